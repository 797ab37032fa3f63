"""Building the CPU kernels, from a source that compiles in a second: what goes wrong ends in a warning, not a broken library."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.model.native.build import MODULE_NAME, find_or_build, try_load

SOURCE = f"""#include <Python.h>
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{MODULE_NAME}", nullptr, -1, nullptr}};
PyMODINIT_FUNC PyInit_{MODULE_NAME}() {{
    PyObject* const module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", 42);
    return module;
}}
"""
BUILD = """
import logging, sys
from pathlib import Path
from core.model.native.build import find_or_build
logging.basicConfig(level=logging.INFO)
print(find_or_build(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "module.cpp").write_text(SOURCE)
    return folder


def start_build(cache: Path, sources: Path) -> subprocess.Popen[str]:
    """In a process that leads a group of its own, compiler included."""
    argv = [sys.executable, "-c", BUILD, str(cache), str(sources)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_build_two_processes_at_once_compile_once(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    builds = [start_build(cache, sources) for _ in range(2)]
    outputs = [build.communicate(timeout=240) for build in builds]
    assert [build.returncode for build in builds] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("once for this machine" in errors for _, errors in outputs) == 1, outputs
    assert getattr(try_load(cache, sources), "answer", None) == 42


def test_build_that_was_killed_leaves_nothing_behind_the_next(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    killed = start_build(cache, sources)
    deadline_s = time.monotonic() + 120
    while not list(cache.glob("build-*")):
        assert killed.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert list(cache.glob("build-*")) and not list(cache.glob("*/*.so"))
    library = find_or_build(cache, sources)
    library.write_bytes(library.read_bytes()[:100])  # and a damaged one is built again
    assert getattr(try_load(cache, sources), "answer", None) == 42
    assert not list(cache.glob("build-*"))


def test_build_without_compiler_warns_what_to_install(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert try_load(tmp_path / "cache", sources) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no no-such-compiler: install g++ and ninja" in record.getMessage()


def test_build_compiler_that_refuses_is_quoted(tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sources / "module.cpp").write_text("#error this machine is too old")
    assert try_load(tmp_path / "cache", sources) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "this machine is too old" in caplog.text


def test_build_where_nothing_can_be_written_warns(tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert try_load(tmp_path / "file" / "cache", sources) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "plain torch serves instead" in caplog.text
