"""Looking into a store apart from an engine: what `kvrelay cache` asks of it, and how blocks are judged there.

A connector's module offers it as open_browser(options). Blocks are handled as they are at rest, header and payload, so that
neither model nor key is needed to list, verify and move them.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.coding.block_coding import Cipher
from connectors.stored_block import read_block_header
from core.errors import ConnectorError

BATCH_BYTES = 8 * 1024 * 1024  # read or written at a time
MAX_BATCH_BLOCKS = 256
MAX_BLOCK_BYTES = 2**30  # a larger one is damage


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A stored block as it is listed. Nothing of it is verified.

    num_bytes: what it occupies. eviction_order: the block with the least goes first; only its order means something, within one
    store. Times are Unix seconds, None where the store does not know. place: where it is, in words. handle: the browser's own.
    is_pinned: it is not evicted.
    """

    layout_fingerprint: bytes
    block_hash: bytes
    num_bytes: int
    eviction_order: int
    place: str
    last_used_s: float | None = None
    expires_s: float | None = None
    handle: Any = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class RawBlock:
    """A block's header and payload as they are at rest: a copy, which no store changes."""

    header: bytes
    payload: bytes

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return len(self.header) + len(self.payload)


class WriteOutcome(enum.Enum):
    """What became of a block that was to be written."""

    WRITTEN = "written"
    PRESENT = "present"  # was there already
    NO_ROOM = "no room"
    OTHER_SIZE = "other size"  # than the blocks of its layout have in this store
    OTHER_FORM = "other form"  # encoded, where the store has blocks only as they are in a pool


class StoreBrowser(ABC):
    """A store that somebody looks into, with or without engines that use it at the same time.

    One thread. Every method may raise ConnectorError for a medium that fails. Engines never wait long for a browser: it works
    in batches. All in words: problems, parts of the store that could not be looked at; missing, parts that nobody has made yet,
    as a write would; notes, what else is worth knowing.

    ends_with_its_users: nothing is missing of a tier that nobody uses, and so cannot hold anything.
    why_read_only: why nothing can be written or removed ("": it can). why_no_pins: why no block can be kept from eviction.
    cipher: of the key that the options name, if they do.
    """

    ends_with_its_users = False
    why_read_only = ""
    why_no_pins = "this kind of store has no pins: nvme, shm, and tiers of them have"

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.cipher: Cipher | None = None

    def cipher_for(self, entry: BlockEntry) -> Cipher | None:
        """What decrypts this block, if it is encrypted with the key that the options name."""
        return self.cipher

    @property
    def capacity_by_tier(self) -> Mapping[str, int]:
        """Of the tiers, by name, where the store has such; 0: no limit, or not known."""
        return {}

    def tier_of(self, entry: BlockEntry) -> str:
        """The name of the tier that listed it, where the store has tiers."""
        return ""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """What the store may hold; 0: no limit, or not known."""

    @abstractmethod
    def entries(self) -> Iterator[BlockEntry]:
        """All blocks, in no order. What changes meanwhile may be missing, or listed and gone."""

    @abstractmethod
    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """Which of these blocks the store says it has."""

    def find_by_tier(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> Mapping[str, list[bool]]:
        """As find(), for each tier, where the store has tiers."""
        return {}

    @abstractmethod
    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """Copies of these blocks, in their order; None for one that has gone or changed since it was listed."""

    @abstractmethod
    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Store verified blocks, given in the order in which they were last used: the last one counts as used last."""

    @abstractmethod
    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """Take these blocks away, except those that changed since they were listed; how many went. A store that is read
        only takes away what it finds to be damaged itself, and nothing else."""

    def can_remove(self, entry: BlockEntry) -> bool:
        """Whether a block that is intact can be taken away."""
        return not self.why_read_only

    def pin(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> list[bool]:
        """Keep those blocks of a prefix that are stored from eviction, as far as the store has room for that, or no longer; which
        are pinned now. Raises ConnectorError where why_no_pins says something."""
        raise ConnectorError(self.why_no_pins)

    @abstractmethod
    def close(self) -> None:
        """Let go of the store. Safe to repeat."""


def find_fault(block: RawBlock, layout_fingerprint: bytes, block_hash: bytes) -> str:
    """What is wrong with a block that was listed under these names, in words; "" when it is intact at rest."""
    if not block.header:
        return "what is there is no block"
    if not any(block.header):
        return "it was never written"
    header = read_block_header(block.header)
    if header is None:
        return "its header is damaged"
    if header.layout_fingerprint != layout_fingerprint:
        return f"it is of layout {header.layout_fingerprint.hex()}"
    if header.block_hash != block_hash:
        return f"it is block {header.block_hash.hex()}"
    if header.payload_bytes != len(block.payload):
        return f"it has {len(block.payload)} bytes instead of {header.payload_bytes}"
    return "" if header.matches(block.payload) else "its payload does not match its checksum"


def cut_to_payload(header: bytes, payload: bytes) -> RawBlock:
    """A block from a place that may be larger than it: as many bytes of the place as the header speaks of."""
    found = read_block_header(header)
    if found is not None and found.payload_bytes <= len(payload):
        payload = payload[: found.payload_bytes]
    return RawBlock(header, payload)


def in_batches(entries: Iterable[BlockEntry]) -> Iterator[list[BlockEntry]]:
    """Runs of entries of one layout, of about BATCH_BYTES each."""
    batch: list[BlockEntry] = []
    num_bytes = 0
    for entry in entries:
        is_full = num_bytes + entry.num_bytes > BATCH_BYTES or len(batch) >= MAX_BATCH_BLOCKS
        if batch and (is_full or entry.layout_fingerprint != batch[0].layout_fingerprint):
            yield batch
            batch, num_bytes = [], 0
        batch.append(entry)
        num_bytes += entry.num_bytes
    if batch:
        yield batch
