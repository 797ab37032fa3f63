"""The store of a loaded cluster is deleted, corrupted, full or read-only: every answer is right, and later it is used again."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.small_disk import fill_up, mounted_tmpfs
from tests.e2e.prompts import MODEL
from tests.fault.store_rig import StoreRig
from tests.support.cluster import SLOW_KERNELS, Cluster, ClusterSpec

KINDS = ("index", "segment")
CORRUPTION_INTERVAL_S = 0.002
NUM_FLIPS_PER_OPENING = 100
NUM_HEADER_WORDS = 11
HEADER_SHARE = 0.01  # of the flips in an index: some two a second, each of which may cost the whole store
SMALL_DISK_BYTES = 24 * 1024 * 1024  # some 60 blocks


@contextlib.contextmanager
def _store_rig(connector: str, root: Path, **options: object) -> Iterator[StoreRig]:
    spec = ClusterSpec(
        model=MODEL,
        dtype="bfloat16",
        connector=connector,
        connector_options=options,
        engine={**SLOW_KERNELS, "kv_pool_mib": 192, "max_num_batched_tokens": 256, "kv_load_policy": "always"},
    )
    with Cluster(spec) as cluster:
        rig = StoreRig(cluster, root if connector == "nvme" else None)
        yield rig
        rig.client.close()


@pytest.fixture(scope="module", params=["nvme", "shm"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreRig]:
    root = tmp_path_factory.mktemp("store") / "kv"
    options: dict[str, object] = {"capacity_bytes": "64MiB"}
    if request.param == "nvme":
        options["path"] = str(root)
    with _store_rig(request.param, root, **options) as rig:
        yield rig


class Corruption:
    """A thread that flips bits all over a store: in blocks and their headers, in index records, and in the index's header."""

    def __init__(self, rig: StoreRig) -> None:
        self.num_flipped = 0
        self._rig = rig
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Corruption:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(5)
        while not self._is_stopping.is_set():
            with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:  # nodes may make new ones
                files = {}
                for kind in KINDS:
                    path = next(iter(self._rig.files(kind)), None)
                    if path is None:
                        raise FileNotFoundError
                    files[kind] = opened.enter_context(path.open("r+b", buffering=0)).fileno()
                for _ in range(NUM_FLIPS_PER_OPENING):
                    self._flip(files, rng)
                    self._is_stopping.wait(CORRUPTION_INTERVAL_S)

    def _flip(self, files: dict[str, int], rng: random.Random) -> None:
        kind = rng.choice(KINDS)
        offset = rng.randrange(max(1, os.fstat(files[kind]).st_size))
        if kind == "index" and rng.random() < HEADER_SHARE:
            offset = rng.randrange(8 * NUM_HEADER_WORDS)
        if byte := os.pread(files[kind], 1, offset):
            os.pwrite(files[kind], bytes([byte[0] ^ 1 << rng.randrange(8)]), offset)
            self.num_flipped += 1


@pytest.mark.timeout(300)
def test_store_corrupted_under_load_every_answer_is_right_and_it_is_used_afterwards(rig: StoreRig) -> None:
    rig.check_used()
    assert all(rig.files(kind) for kind in KINDS)
    with Corruption(rig) as corruption:
        rig.check_right_under_load()
    assert corruption.num_flipped > 500
    rig.check_right_under_load(2.0)
    rig.check_used()


@pytest.mark.timeout(300)
def test_store_deleted_under_load_every_answer_is_right_and_a_new_one_is_used_afterwards(rig: StoreRig) -> None:
    rig.check_used()
    rig.remove_store()
    rig.check_right_under_load()
    rig.check_used()
    assert all(rig.files(kind) for kind in KINDS)


@pytest.mark.timeout(300)
def test_disk_read_only_then_full_then_free_answers_are_right_and_it_is_used_in_the_end_skipped_where_mounting_is_forbidden(
    tmp_path: Path,
) -> None:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)

    with mounted_tmpfs(tmp_path / "disk", SMALL_DISK_BYTES) as disk:
        remount("ro")
        with _store_rig("nvme", disk / "kv", path=str(disk / "kv"), capacity_bytes="4GiB") as rig:
            rig.check_right_under_load(2.0)
            assert rig.files("segment") == []
            remount("rw")
            filler = fill_up(disk)
            rig.check_right_under_load(4.0)
            filler.unlink()
            rig.check_used()
            rig.check_right_under_load(4.0)  # with room for a part of what it computes
            rig.check_used()
