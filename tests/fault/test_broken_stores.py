"""The store of a loaded cluster is deleted, corrupted, full or read-only: every answer is right, and later it is used again."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.small_disk import mounted_tmpfs
from tests.e2e.prompts import MODEL
from tests.fault.verified_load import Outcome, Question, VerifiedClient, VerifiedLoad
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec

PROMPT_LENGTHS = (24, 50, 100, 200, 300, 450)
NUM_OUTPUT_TOKENS = 24
LOAD_S = 6.0
CORRUPTION_INTERVAL_S = 0.002
NUM_HEADER_WORDS = 11
HEADER_SHARE = 0.01  # of the flips in an index: some two a second, each of which may cost the whole store
SMALL_DISK_BYTES = 24 * 1024 * 1024  # some 60 blocks


class StoreRig:
    """A cluster of one node per role on a store of its own, and questions with known answers."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        """root: where the store's directories are."""
        self.cluster = cluster
        self.root = root
        self.client = VerifiedClient(cluster.url, MODEL_NAME, deadline_s=60.0)
        vocabulary = self.client.vocabulary()
        questions = [
            Question(random.Random(length).choices(vocabulary, k=length), NUM_OUTPUT_TOKENS, 1.0, length)
            for length in PROMPT_LENGTHS
        ]
        self.questions = self.client.with_answers(questions)
        self._num_salts = 0

    def check_right_under_load(self, seconds: float = LOAD_S) -> None:
        """Closed-loop clients for a while."""
        load = VerifiedLoad(self.client, self.questions, num_clients=4, seed=self._num_salts)
        self._num_salts += 1
        load.start()
        time.sleep(seconds)
        load.stop()
        assert load.records
        assert [r.detail for r in load.records if r.outcome is not Outcome.RIGHT] == []
        self.cluster.wait_clean()

    def check_used(self, timeout_s: float = 30.0) -> None:
        """Sooner or later a decode node must find in the store what the prefill node has just computed."""
        before = self._num_external_hit_tokens()

        def is_used() -> bool:
            self._num_salts += 1
            record = self.client.start(self.questions[3], f"is it used {self._num_salts}")
            assert self.client.wait_for([record]) == [Outcome.RIGHT], record.detail
            return self._num_external_hit_tokens() > before

        self.cluster.wait_until(is_used, "the store is used", timeout_s)

    def _num_external_hit_tokens(self) -> float:
        return self.cluster.client.metric("kvrelay_external_prefix_cache_hits_total", role="decode")

    def files(self) -> list[Path]:
        """Index and segment files of the store."""
        return [path for path in self.root.rglob("*") if path.name in ("index", "segment")]


@contextlib.contextmanager
def _store_rig(connector: str, root: Path, **options: object) -> Iterator[StoreRig]:
    spec = ClusterSpec(
        model=MODEL,
        dtype="bfloat16",
        connector=connector,
        connector_options=options,
        engine={"kv_pool_mib": 192, "max_num_batched_tokens": 256, "kv_load_policy": "always"},
    )
    with Cluster(spec) as cluster:
        rig = StoreRig(cluster, root if connector == "nvme" else Path("/dev/shm"))
        if connector == "shm":
            (rig.root,) = Path("/dev/shm").glob(f"*/*{cluster.pool_name}*")
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

    def __init__(self, files: list[Path]) -> None:
        self.num_flipped = 0
        self._files = files
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
        while not self._is_stopping.wait(CORRUPTION_INTERVAL_S):
            path = rng.choice(self._files)
            with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:  # nodes may make new ones
                offset = rng.randrange(max(1, os.fstat(file.fileno()).st_size))
                if path.name == "index" and rng.random() < HEADER_SHARE:
                    offset = rng.randrange(8 * NUM_HEADER_WORDS)
                if byte := os.pread(file.fileno(), 1, offset):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), offset)
                    self.num_flipped += 1


@pytest.mark.timeout(300)
def test_store_corrupted_under_load_every_answer_is_right_and_it_is_used_afterwards(rig: StoreRig) -> None:
    rig.check_used()
    files = rig.files()
    assert {path.name for path in files} == {"index", "segment"}
    with Corruption(files) as corruption:
        rig.check_right_under_load()
    assert corruption.num_flipped > 500
    rig.check_right_under_load(2.0)
    rig.check_used()


@pytest.mark.timeout(300)
def test_store_deleted_under_load_every_answer_is_right_and_a_new_one_is_used_afterwards(rig: StoreRig) -> None:
    rig.check_used()
    shutil.rmtree(rig.root)
    rig.check_right_under_load()
    rig.check_used()
    assert {path.name for path in rig.files()} == {"index", "segment"}


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
            assert rig.files() == []
            remount("rw")
            ballast = disk / "ballast"
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(65536))
                    file.flush()
            rig.check_right_under_load(4.0)
            ballast.unlink()
            rig.check_used()
            rig.check_right_under_load(4.0)  # with room for a part of what it computes
            rig.check_used()
