"""The files of a store are damaged while two processes use it and between their restarts: right bytes or a miss, and it heals."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.contract.commanded_process import CommandedProcess
from connectors.contract.node import LAYOUT
from connectors.slots.store import slot_bytes
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header
from tests.fuzz.examples import num_examples
from tests.support.memory_pools import pool_files

NUM_BLOCKS = 40  # fewer than all chains have, so that slots are recycled
_SLOT_BYTES = slot_bytes(LAYOUT)
_WORDS = [0, 1, 2, 255, 2**31, 2**32 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class StoreFiles:
    """Where a store's bytes are: below root, or, without one, in the memory of the pool of that name."""

    name: str
    root: Path | None

    def files(self) -> list[Path]:
        """All of them; those that matter several times."""
        if self.root is None:
            return [path for kind in ("index", "segment") for path in pool_files(self.name, kind)[:1]]
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        return [path for path in files if path.name in ("index", "segment")] * 4 + files

    def options(self) -> dict[str, Any]:
        """Of the connector."""
        capacity = {"capacity_bytes": NUM_BLOCKS * (_SLOT_BYTES + 64) + 72 * 1024}
        return {"name": self.name, **capacity} if self.root is None else {"path": str(self.root), **capacity}

    def remove(self) -> None:
        """What is on a disk; memory goes with its users."""
        if self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)


@dataclass(frozen=True)
class Damage:
    """One change of a file, found by its number among the store's files. place and size are fractions of the file's length."""

    file_number: int
    kind: str
    place: float
    size: float
    word: int

    def apply(self, store: StoreFiles) -> None:
        """Make it; a file that is gone or cannot be changed so is left."""
        files = store.files()
        if files:
            with suppress(FileNotFoundError if store.root else OSError):  # memory cannot be cut, extended or removed
                self._apply_to(files[self.file_number % len(files)])

    def _apply_to(self, path: Path) -> None:
        length = path.stat().st_size
        start = int(self.place * length)
        num_bytes = min(length - start, 1 + int(self.size * 3 * _SLOT_BYTES))
        with path.open("r+b") as file:
            match self.kind:
                case "flip":
                    file.seek(start)
                    byte = file.read(1)
                    file.seek(start)
                    file.write(bytes([(byte[0] if byte else 0) ^ (1 << self.word % 8)]))
                case "zero" | "random" | "ones":
                    file.seek(start)
                    fill = {"zero": bytes, "random": os.urandom, "ones": lambda count: b"\xff" * count}[self.kind]
                    file.write(fill(num_bytes))
                case "word":  # of the header for half of the places, else of a record
                    file.seek(8 * (self.file_number % 12) if self.size < 0.5 else start // 8 * 8)
                    file.write(self.word.to_bytes(8, "little"))
                case "cut":
                    os.ftruncate(file.fileno(), start)
                case "cut and extend":
                    os.ftruncate(file.fileno(), start)
                    os.ftruncate(file.fileno(), length)
                case "extend":
                    file.seek(0, os.SEEK_END)
                    file.write(os.urandom(num_bytes))
                case "copy" | "swap":
                    other = start // 2 // _SLOT_BYTES * _SLOT_BYTES
                    start = start // _SLOT_BYTES * _SLOT_BYTES
                    file.seek(start)
                    first = file.read(_SLOT_BYTES)
                    file.seek(other)
                    second = file.read(_SLOT_BYTES)
                    file.seek(other)
                    file.write(first)
                    if self.kind == "swap":
                        file.seek(start)
                        file.write(second)
                case "remove":
                    path.unlink()
                case "replace":
                    unfinished = path.with_name("replacement")
                    unfinished.write_bytes(os.urandom(num_bytes))
                    unfinished.replace(path)


_KINDS = [
    "flip",
    "zero",
    "random",
    "ones",
    "word",
    "word",
    "cut",
    "cut and extend",
    "extend",
    "copy",
    "swap",
    "remove",
    "replace",
]
DAMAGES = st.builds(
    Damage,
    file_number=st.integers(0, 100),
    kind=st.sampled_from(_KINDS),
    place=st.floats(0, 1),
    size=st.floats(0, 1),
    word=st.sampled_from(_WORDS) | st.integers(0, 2**64 - 1),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 1), st.integers(0, 1000)),
        st.tuples(st.just("damage"), DAMAGES),
        st.tuples(st.just("damage at work"), st.integers(0, 1000), st.lists(DAMAGES, min_size=1, max_size=4)),
        st.tuples(st.just("reopen"), st.integers(0, 1)),
        st.tuples(st.just("damage while closed"), st.lists(DAMAGES, min_size=1, max_size=3)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[CommandedProcess]]:
    """Two users of the stores, the same for all examples."""
    started = [CommandedProcess("tests.fuzz.store_process"), CommandedProcess("tests.fuzz.store_process")]
    yield started
    for process in started:
        process.kill()


@pytest.fixture(params=["shm", "nvme"])
def medium(request: pytest.FixtureRequest) -> str:
    """The connector's name."""
    name: str = request.param
    return name


def _new_store(medium: str) -> StoreFiles:
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-fuzz-"))
    if medium == "nvme":
        return StoreFiles(folder.name, folder)
    folder.rmdir()  # only its name is wanted
    return StoreFiles(folder.name, None)


@given(steps=STEPS)
@settings(max_examples=num_examples(12))
def test_store_damaged_in_any_way_supplies_right_bytes_or_misses_and_heals(
    processes: list[CommandedProcess], medium: str, steps: list[tuple[Any, ...]]
) -> None:
    store = _new_store(medium)
    try:
        _run(processes, medium, store, steps)
    except BaseException:
        for number, process in enumerate(processes):  # the next example, a smaller one, needs live ones
            process.kill()
            processes[number] = CommandedProcess("tests.fuzz.store_process")
        raise
    finally:
        store.remove()


def _run(processes: list[CommandedProcess], medium: str, store: StoreFiles, steps: list[tuple[Any, ...]]) -> None:
    opening = {"connector_name": medium, "options": store.options()}
    for number, process in enumerate(processes):
        process.ask("open", **opening)
        process.ask("work", seed=number, num_operations=12)
    for step in steps:
        match step:
            case ("work", number, seed):
                processes[number].ask("work", seed=seed, num_operations=8)
            case ("damage", damage):
                damage.apply(store)
            case ("damage at work", seed, damages):
                for process in processes:
                    process.send("work", seed=seed, num_operations=25)
                for damage in damages:
                    damage.apply(store)
                for process in processes:
                    process.answer()
            case ("reopen", number):
                processes[number].ask("close")
                processes[number].ask("open", **opening)
            case ("damage while closed", damages):
                for process in processes:
                    process.ask("close")
                for damage in damages:
                    damage.apply(store)
                for process in processes:
                    process.ask("open", **opening)
    for number, process in enumerate(processes):
        process.ask("heal", seed=number)
    for process in processes:
        process.ask("close")
    for process in processes:
        process.ask("open", **opening)
        process.ask("heal", seed=7)
        process.ask("close")


@pytest.mark.parametrize("name", ["segment", "index"])
def test_store_on_disk_cut_again_and_again_under_its_users_ends_none_of_them(
    processes: list[CommandedProcess], tmp_path: Path, name: str
) -> None:
    store = StoreFiles("store", tmp_path)
    for process in processes:
        process.ask("open", connector_name="nvme", options=store.options())
    for number in range(8):
        for process in processes:
            process.send("work", seed=number, num_operations=20)
        for _ in range(10):
            for path in tmp_path.rglob(name):
                with suppress(FileNotFoundError):
                    os.truncate(path, 0)
            time.sleep(0.002)
        for process in processes:
            process.answer()
            process.ask("heal", seed=number)
    for process in processes:
        process.ask("close")


@given(header=st.binary(max_size=2 * BLOCK_HEADER_BYTES), payload=st.binary(max_size=64))
@settings(max_examples=num_examples(200))
def test_stored_block_random_header_is_never_right(header: bytes, payload: bytes) -> None:
    assert check_block(header, payload, b"f" * 16, b"h" * 16) is not BlockCheck.OK


@given(
    payload=st.binary(min_size=1, max_size=64),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), min_size=1, max_size=3),
    is_header=st.booleans(),
)
@settings(max_examples=num_examples(200))
def test_stored_block_with_changed_bytes_is_never_right(payload: bytes, changes: list[tuple[int, int]], is_header: bool) -> None:
    header = pack_block_header(b"f" * 16, b"h" * 16, payload)
    assert check_block(header, payload, b"f" * 16, b"h" * 16) is BlockCheck.OK
    changed = bytearray(header if is_header else payload)
    for place, mask in changes:
        changed[place % len(changed)] ^= mask
    if changed != (header if is_header else payload):
        pair = (bytes(changed), payload) if is_header else (header, bytes(changed))
        assert check_block(*pair, b"f" * 16, b"h" * 16) is not BlockCheck.OK
