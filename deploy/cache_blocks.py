"""What `kvrelay cache` does with a store and its blocks: open, choose, verify, remove, export, import. Prints only progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from connectors.block_stream import BlockStreamError, BlockStreamWriter, read_block_stream
from connectors.byte_sizes import readable_bytes
from connectors.coding.block_coding import Encryption, decoded_in_full, judge_encryption
from connectors.registry import open_browser
from connectors.store_browser import (
    BATCH_BYTES,
    MAX_BATCH_BLOCKS,
    BlockEntry,
    RawBlock,
    StoreBrowser,
    WriteOutcome,
    find_fault,
)
from connectors.stored_block import read_block_header
from core.config import Config
from deploy.topology import with_default_folder

_PROGRESS_INTERVAL_S = 2.0
_REMOVED_AT_A_TIME = 1024
_AGES = (("within a minute", 60.0), ("within an hour", 3600.0), ("within a day", 86400.0), ("within a week", 604800.0))
BAD = "bad"  # what became of a block of an export, beside the WriteOutcomes


class Progress:
    """A line on stderr every other second of a long command."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S
        self._num_blocks = self._num_bytes = 0

    def add(self, num_blocks: int, num_bytes: int) -> None:
        """So much more is done."""
        self._num_blocks += num_blocks
        self._num_bytes += num_bytes
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            print(f"{self._verb} {self._num_blocks} blocks, {readable_bytes(self._num_bytes)}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class ReadReport:
    """What reading blocks found. num_gone: evicted, or stored anew, since they were listed. num_copies: of exported, in other
    tiers. The rest is of intact blocks that are encrypted: with the key given, with another, and without one given."""

    num_ok: int = 0
    num_gone: int = 0
    num_copies: int = 0
    num_readable: int = 0
    num_other_key: int = 0
    num_without_key: int = 0
    faults: list[tuple[BlockEntry, str]] = field(default_factory=list)


@dataclass(slots=True)
class ImportReport:
    """counts: by what became of the blocks. error: where the export stops being one; all before it counts."""

    counts: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def num_refused(self) -> int:
        """Blocks that should be in the store and are not."""
        there = (WriteOutcome.WRITTEN.value, WriteOutcome.PRESENT.value)
        return sum(count for what, count in self.counts.items() if what not in there)


def open_store(config: Config) -> StoreBrowser:
    """The store that a configuration names; nvme without a path is where `serve` puts it.

    Raises InvalidInputError or another KVRelayError.
    """

    def read_secret() -> bytes:
        from core.wire.curve import load_keys  # which few stores need

        keys = load_keys(config.security.keys, "node")
        return keys.derive_secret("connector") if keys is not None else b""

    connector = with_default_folder(config).connector
    return open_browser(connector.name, connector.options, read_secret)


def entries_of(browser: StoreBrowser, layout_prefix: str) -> Iterator[BlockEntry]:
    """The blocks of layouts whose fingerprint begins with these hexadecimal digits."""
    return (entry for entry in browser.entries() if entry.layout_fingerprint.hex().startswith(layout_prefix))


def summarize_tiers(browser: StoreBrowser, entries: Iterable[BlockEntry]) -> dict[str, dict[str, int]]:
    """Counts and sizes per tier, as JSON has them; none for a store without tiers."""
    tiers = {
        name: {"num_blocks": 0, "num_bytes": 0, "capacity_bytes": capacity} for name, capacity in browser.capacity_by_tier.items()
    }
    for entry in entries if tiers else ():
        counts = tiers[browser.tier_of(entry)]
        counts["num_blocks"] += 1
        counts["num_bytes"] += entry.num_bytes
    return tiers


def summarize(entries: Iterable[BlockEntry], capacity_bytes: int, now_s: float) -> dict[str, Any]:
    """Counts, sizes and ages, as JSON has them."""
    layouts: dict[str, dict[str, int]] = {}
    ages = dict.fromkeys((*(name for name, _ in _AGES), "longer ago", "unknown"), 0)
    num_pinned = 0
    oldest_s: float | None = None
    for entry in entries:
        counts = layouts.setdefault(entry.layout_fingerprint.hex(), {"num_blocks": 0, "num_bytes": 0})
        counts["num_blocks"] += 1
        counts["num_bytes"] += entry.num_bytes
        num_pinned += entry.is_pinned
        if entry.last_used_s is None:
            ages["unknown"] += 1
            continue
        oldest_s = min(entry.last_used_s, oldest_s or entry.last_used_s)
        age_s = now_s - entry.last_used_s
        ages[next((name for name, limit_s in _AGES if age_s < limit_s), "longer ago")] += 1
    return {
        "num_blocks": sum(counts["num_blocks"] for counts in layouts.values()),
        "num_bytes": sum(counts["num_bytes"] for counts in layouts.values()),
        "capacity_bytes": capacity_bytes,
        "num_pinned": num_pinned,
        "oldest_use_s": oldest_s,
        "layouts": layouts,
        "ages": ages,
    }


def verify_blocks(browser: StoreBrowser, entries: Iterable[BlockEntry], progress: Progress) -> ReadReport:
    """Read every block and judge it, also by the key that the store's options name."""
    report = ReadReport()
    for entry, block in _intact(browser, entries, progress, report):
        encryption = judge_encryption(block.header, block.payload, browser.cipher_for(entry))
        if encryption is Encryption.FORGED:
            report.faults.append((entry, f"it is {encryption.value}"))
            continue
        report.num_ok += 1
        report.num_readable += encryption is Encryption.READABLE
        report.num_other_key += encryption is Encryption.OTHER_KEY
        report.num_without_key += encryption is Encryption.NO_KEY
    return report


def export_blocks(browser: StoreBrowser, entries: Iterable[BlockEntry], file: BinaryIO, progress: Progress) -> ReadReport:
    """Write intact blocks, least recently used first, so that an import can use them in that order.

    Compressed blocks are written as they are in the pool, which every store can take. What several tiers have is written once:
    slower tiers come first, because faster ones have what was used later.
    """
    report = ReadReport()
    writer = BlockStreamWriter(file)
    speeds = {name: -number for number, name in enumerate(browser.capacity_by_tier)}
    exported: set[tuple[bytes, bytes]] = set()

    def chosen() -> Iterator[BlockEntry]:
        for entry in sorted(entries, key=lambda entry: (speeds.get(browser.tier_of(entry), 0), entry.eviction_order)):
            if (entry.layout_fingerprint, entry.block_hash) in exported:
                report.num_copies += 1
            else:
                yield entry

    for entry, block in _intact(browser, chosen(), progress, report):
        if speeds:
            if (entry.layout_fingerprint, entry.block_hash) in exported:  # it was chosen before its copy was written
                report.num_copies += 1
                continue
            exported.add((entry.layout_fingerprint, entry.block_hash))
        plain = decoded_in_full(block.header, block.payload)
        writer.write(block if plain is None else RawBlock(*plain), entry.last_used_s)
        report.num_ok += 1
    writer.finish()
    return report


def _intact(
    browser: StoreBrowser, entries: Iterable[BlockEntry], progress: Progress, report: ReadReport
) -> Iterator[tuple[BlockEntry, RawBlock]]:
    for entry, block in browser.read(entries):
        progress.add(1, entry.num_bytes)
        if block is None:
            report.num_gone += 1
        elif fault := find_fault(block, entry.layout_fingerprint, entry.block_hash):
            report.faults.append((entry, fault))
        else:
            yield entry, block


def import_blocks(browser: StoreBrowser, file: BinaryIO, progress: Progress) -> ImportReport:
    """Store the intact blocks of an export. Bad ones are counted and left out."""
    report = ImportReport()
    batch: list[RawBlock] = []

    def store() -> None:
        for outcome in browser.write(batch):
            report.counts[outcome.value] = report.counts.get(outcome.value, 0) + 1
        batch.clear()

    try:
        for record in read_block_stream(file):
            block = record.block
            progress.add(1, block.num_bytes)
            header = read_block_header(block.header)
            if header is None or find_fault(block, header.layout_fingerprint, header.block_hash):
                report.counts[BAD] = report.counts.get(BAD, 0) + 1
                continue
            batch.append(block)
            if len(batch) >= MAX_BATCH_BLOCKS or sum(each.num_bytes for each in batch) >= BATCH_BYTES:
                store()
    except BlockStreamError as error:
        report.error = str(error)
    store()
    return report


def choose_to_prune(
    entries: Sequence[BlockEntry], older_than_s: float | None, max_bytes: int | None, now_s: float
) -> tuple[list[BlockEntry], int]:
    """What goes, in the order of eviction, which takes a prefix from its end; and of how many the age is not known.

    All of them where neither limit is given; else pinned ones stay, as they would.
    """
    ordered = sorted(entries, key=lambda entry: entry.eviction_order)
    free = [entry for entry in ordered if not entry.is_pinned]
    if older_than_s is not None:
        old = [entry for entry in free if entry.last_used_s is not None and entry.last_used_s <= now_s - older_than_s]
        return old, sum(entry.last_used_s is None for entry in free)
    if max_bytes is None:
        return ordered, 0
    num_bytes = sum(entry.num_bytes for entry in ordered)
    chosen = []
    for entry in free:
        if num_bytes <= max_bytes:
            break
        chosen.append(entry)
        num_bytes -= entry.num_bytes
    return chosen, 0


def remove_blocks(browser: StoreBrowser, entries: Sequence[BlockEntry], progress: Progress | None = None) -> int:
    """Take blocks away, in this order; how many went."""
    num_removed = 0
    for start in range(0, len(entries), _REMOVED_AT_A_TIME):
        part = entries[start : start + _REMOVED_AT_A_TIME]
        num_removed += browser.remove(part)
        if progress is not None:
            progress.add(len(part), sum(entry.num_bytes for entry in part))
    return num_removed
