"""Pages that vanish under a mapping, in a process of its own: it must live, and only what is guarded may be forgiven."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_PRELUDE = """
    import mmap, os, sys, threading
    import numpy as np
    from connectors.slots.bus_guard import GuardedMapping
    path = sys.argv[1]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    size = 64 * 4096
    os.ftruncate(descriptor, size)
    guarded = GuardedMapping(descriptor, size)
    view = np.frombuffer(guarded.view, dtype=np.uint8)
    view[:] = 7
"""


def _run(path: Path, script: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(_PRELUDE) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)


def test_bus_guard_cut_file_reads_as_zeros_and_is_told(tmp_path: Path) -> None:
    ended = _run(
        tmp_path / "file",
        """
        assert not guarded.has_lost_pages
        os.ftruncate(descriptor, 4096)
        copy = np.zeros(size, dtype=np.uint8)
        np.copyto(copy, view)  # without the GIL
        assert guarded.has_lost_pages
        assert (copy[:4096] == 7).all() and (copy[4096:] == 0).all()
        view[:] = 1  # goes nowhere
        assert os.path.getsize(path) == 4096
        """,
    )
    assert ended.returncode == 0, ended.stderr


def test_bus_guard_file_cut_again_and_again_under_copying_threads_ends_nobody(tmp_path: Path) -> None:
    ended = _run(
        tmp_path / "file",
        """
        must_end = threading.Event()
        def copy(view):
            target = np.zeros(size, dtype=np.uint8)
            while not must_end.is_set():
                np.copyto(target, view)
                view[5] = 1
                int(view[::4096].sum())
        for _ in range(30):
            os.ftruncate(descriptor, size)
            fresh = GuardedMapping(descriptor, size)
            must_end.clear()
            threads = [threading.Thread(target=copy, args=(np.frombuffer(fresh.view, dtype=np.uint8),)) for _ in range(3)]
            for thread in threads: thread.start()
            os.ftruncate(descriptor, 0)
            must_end.wait(0.002)
            must_end.set()
            for thread in threads: thread.join()
        """,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_bus_guard_mapping_of_somebody_else_still_ends_the_process(tmp_path: Path, is_forgotten: bool) -> None:
    ended = _run(
        tmp_path / "file",
        f"""
        if {is_forgotten}:
            del view, guarded
        other = mmap.mmap(descriptor, size)
        os.ftruncate(descriptor, 0)
        print(other[5000], flush=True)
        """,
    )
    assert ended.returncode == -signal.SIGBUS
