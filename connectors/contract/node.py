"""A stand-in for the engine around a connector: a pool, a clock, and blocks whose content follows from their hash.

Used by the tests and, in other processes, by peer.py. Every block that a load calls good is compared here, so that no test
can forget to.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence

from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=16, dtype="float32")  # 2 KiB: half a page is padding
PAGES_LAYOUT = KVLayout(num_layers=4, block_size=8, num_kv_heads=2, head_dim=32, dtype="float32")  # 16 KiB: no padding
EIGHT_BIT_LAYOUT = KVLayout(num_layers=3, block_size=8, num_kv_heads=3, head_dim=20, dtype="int8")  # scales: no power of two
REAL_LAYOUT = KVLayout(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")  # 360 KiB

HANG_S = 60.0  # a wait this long is a hang, whatever the machine
NUM_POOL_BLOCKS = 64


class SteppedClock:
    """The real clock plus what a test adds to it."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now_s(self) -> float:
        """Seconds."""
        return time.monotonic() + self.offset_s


def block_hashes(
    seed: int,
    num_tokens: int,
    layout: KVLayout = LAYOUT,
    model_fingerprint: bytes = b"model",
    cache_salt: str = "",
    adapter_fingerprint: bytes = b"",
) -> list[bytes]:
    """Hashes of the full blocks of a prompt of its own for each seed."""
    root = Namespace(model_fingerprint, layout.fingerprint, layout.block_size).root_hash(cache_salt, adapter_fingerprint)
    hashes: list[bytes] = []
    extend_block_hashes(hashes, range(seed * 100_000, seed * 100_000 + num_tokens), layout.block_size, root)
    return hashes


def chain(seed: int, num_blocks: int, layout: KVLayout = LAYOUT) -> list[bytes]:
    """Hashes of a prompt of that many full blocks."""
    return block_hashes(seed, num_blocks * layout.block_size, layout)


def content_of(block_hash: bytes, layout: KVLayout = LAYOUT) -> bytes:
    """What the block of this hash holds."""
    return hashlib.shake_128(block_hash).digest(layout.block_bytes)


class Node:
    """One connector with its own pool. Not safe for threads, as the engine's step thread is the only caller."""

    def __init__(self, connector: KVConnector, clock: SteppedClock, layout: KVLayout = LAYOUT) -> None:
        self.connector = connector
        self.clock = clock
        self.layout = layout
        self.pool = KVPoolMemory(layout, NUM_POOL_BLOCKS)
        self._ids = itertools.count(1)
        connector.register_kv_cache(self.pool)

    def transfer(
        self,
        direction: TransferDirection,
        hashes: Sequence[bytes],
        request_id: str = "",
        timeout_s: float = HANG_S,
        first_block: int = 0,
    ) -> Transfer:
        """A transfer of these blocks to or from the pool's blocks first_block and up."""
        block_ids = tuple(range(first_block, first_block + len(hashes)))
        deadline_s = self.clock.now_s() + timeout_s
        request_id = request_id or f"request-{hashes[0].hex()[:8] if hashes else 'empty'}"
        return Transfer(next(self._ids), direction, request_id, block_ids, tuple(hashes), deadline_s)

    def fill(self, transfer: Transfer) -> None:
        """Put the content of its hashes into a transfer's blocks."""
        for block_id, name in zip(transfer.block_ids, transfer.block_hashes, strict=True):
            self.pool.block(block_id)[:] = content_of(name, self.layout)

    def start_save(self, hashes: Sequence[bytes], request_id: str = "", first_block: int = 0) -> Transfer:
        """Fill blocks and begin to save them."""
        transfer = self.transfer(TransferDirection.SAVE, hashes, request_id, first_block=first_block)
        self.fill(transfer)
        self.connector.start_save(transfer)
        return transfer

    def start_load(self, hashes: Sequence[bytes], request_id: str = "", first_block: int = 0) -> Transfer:
        """Blank blocks and begin to load into them."""
        transfer = self.transfer(TransferDirection.LOAD, hashes, request_id, first_block=first_block)
        for block_id in transfer.block_ids:
            self.pool.block(block_id)[:] = bytes(self.layout.block_bytes)
        self.connector.start_load(transfer)
        return transfer

    def results(self, transfers: Sequence[Transfer]) -> list[TransferResult]:
        """Wait for the results of these, in this order, which must be all that comes; compare what was loaded."""
        found: dict[int, TransferResult] = {}

        def collect() -> bool:
            for result in self.connector.poll_transfers():
                assert result.transfer_id not in found, "a second result for one transfer"
                found[result.transfer_id] = result
            return len(found) >= len(transfers)

        wait_until(collect)
        assert set(found) == {transfer.transfer_id for transfer in transfers}
        for transfer in transfers:
            self.check(transfer, found[transfer.transfer_id])
        return [found[transfer.transfer_id] for transfer in transfers]

    def check(self, transfer: Transfer, result: TransferResult) -> None:
        """A result must be consistent with itself, and with the pool."""
        num_blocks = len(transfer.block_ids)
        assert (result.outcome is TransferOutcome.OK) == (result.num_blocks_ok == num_blocks)
        assert 0 <= result.num_blocks_ok <= num_blocks
        if transfer.direction is TransferDirection.LOAD:
            for position in range(result.num_blocks_ok):
                name = transfer.block_hashes[position]
                assert bytes(self.pool.block(transfer.block_ids[position])) == content_of(name, self.layout), (
                    "wrong bytes as a hit"
                )

    def save(self, hashes: Sequence[bytes], request_id: str = "") -> TransferResult:
        """Save and wait."""
        return self.results([self.start_save(hashes, request_id)])[0]

    def load(self, hashes: Sequence[bytes], request_id: str = "") -> TransferResult:
        """Load, wait and compare."""
        return self.results([self.start_load(hashes, request_id)])[0]

    def lookup(self, hashes: Sequence[bytes], num_computed_blocks: int = 0, request_id: str = "lookup") -> int:
        """Blocks that the store can supply; asks again while the connector does not know."""
        answers: list[int] = []

        def ask() -> bool:
            question = PrefixLookup(request_id, hashes, self.layout.block_size)
            answer = self.connector.get_num_new_matched_tokens(question, num_computed_blocks * self.layout.block_size)
            if answer is not None:
                answers.append(answer)
            return bool(answers)

        wait_until(ask)
        assert answers[0] % self.layout.block_size == 0
        return answers[0] // self.layout.block_size

    def stats(self) -> ConnectorStats:
        """The connector's."""
        return self.connector.stats()


def wait_result(node: Node, found: list[TransferResult], is_enough: Callable[[], bool]) -> None:
    """Collect results into found until it is enough."""

    def collect() -> bool:
        found.extend(node.connector.poll_transfers())
        return is_enough()

    wait_until(collect)


def wait_until(is_done: Callable[[], bool]) -> None:
    """Poll; a wait of HANG_S is a failure."""
    deadline_s = time.monotonic() + HANG_S
    while not is_done():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.0005)
