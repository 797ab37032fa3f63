"""Looks into all tiers of a tiered store at once: each block is listed once for every tier that has it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from connectors.coding.block_coding import Cipher
from connectors.registry import open_browser as open_child
from connectors.store_browser import BlockEntry, RawBlock, StoreBrowser, WriteOutcome
from connectors.tiered.options import check_tier_connectors, parse_tiered_options
from core.errors import ConfigError, ConnectorError


class TieredBrowser(StoreBrowser):
    """Fastest tier first. What is written goes to the slowest one that takes it, as what is evicted would; an entry's handle is
    its tier's number, and the entry as the tier lists it."""

    def __init__(self, browsers: Mapping[str, StoreBrowser], problems: Sequence[str]) -> None:
        """browsers: by the tiers' names."""
        super().__init__()
        self._names = list(browsers)
        self._browsers = list(browsers.values())
        self.problems = [*problems]
        for name, browser in browsers.items():
            self.problems += [f"tier {name}: {problem}" for problem in browser.problems]
            of_missing = self.notes if browser.ends_with_its_users else self.missing
            of_missing += [f"tier {name}: {missing}" for missing in browser.missing]
        self._writable = [browser for browser in self._browsers if not browser.why_read_only]
        if not self._writable:
            self.why_read_only = self._browsers[-1].why_read_only
        self._pinning = [browser for browser in self._browsers if not browser.why_no_pins]
        if self._pinning:
            self.why_no_pins = ""

    @property
    def capacity_bytes(self) -> int:
        """Of all tiers together; 0 where one has no limit."""
        capacities = [browser.capacity_bytes for browser in self._browsers]
        return sum(capacities) if all(capacities) else 0

    @property
    def capacity_by_tier(self) -> Mapping[str, int]:
        """Of those that can be looked into."""
        return {name: browser.capacity_bytes for name, browser in zip(self._names, self._browsers, strict=True)}

    def tier_of(self, entry: BlockEntry) -> str:
        """By the entry's handle."""
        return self._names[int(entry.handle[0])]

    def cipher_for(self, entry: BlockEntry) -> Cipher | None:
        """Tiers may have keys of their own."""
        number, in_tier = entry.handle
        browser: StoreBrowser = self._browsers[number]
        return browser.cipher_for(in_tier)

    def entries(self) -> Iterator[BlockEntry]:
        """One tier after the other."""
        for number, (name, browser) in enumerate(zip(self._names, self._browsers, strict=True)):
            for entry in browser.entries():
                yield dataclasses.replace(entry, place=f"{name}: {entry.place}", handle=(number, entry))
            self.notes += [note for each in browser.notes if (note := f"tier {name}: {each}") not in self.notes]

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """Whether any tier has them."""
        found = self.find_by_tier(layout_fingerprint, block_hashes).values()
        return [any(in_tiers) for in_tiers in zip(*found, strict=True)]

    def find_by_tier(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> Mapping[str, list[bool]]:
        """Fastest tier first."""
        browsers = zip(self._names, self._browsers, strict=True)
        return {name: browser.find(layout_fingerprint, block_hashes) for name, browser in browsers}

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """Each from the tier that listed it."""
        for number, of_tier in itertools.groupby(entries, key=lambda entry: int(entry.handle[0])):
            asked = list(of_tier)
            blocks = self._browsers[number].read(entry.handle[1] for entry in asked)
            yield from ((entry, block) for entry, (_, block) in zip(asked, blocks, strict=True))

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Into the slowest tier that takes them."""
        return (self._writable or self._browsers)[-1].write(blocks)

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """Each from the tier that listed it."""
        by_tier = itertools.groupby(entries, key=lambda entry: int(entry.handle[0]))
        return sum(self._browsers[number].remove([entry.handle[1] for entry in of_tier]) for number, of_tier in by_tier)

    def can_remove(self, entry: BlockEntry) -> bool:
        """Whether the tier that listed it lets go of it."""
        number, in_tier = entry.handle
        browser: StoreBrowser = self._browsers[number]
        return browser.can_remove(in_tier)

    def pin(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> list[bool]:
        """In every tier that has pins; whether any of them has each block pinned now."""
        if not self._pinning:
            raise ConnectorError(self.why_no_pins)
        answers = [browser.pin(layout_fingerprint, block_hashes, is_pinned=is_pinned) for browser in self._pinning]
        return [any(in_tiers) for in_tiers in zip(*answers, strict=True)]

    def close(self) -> None:
        """Leave all tiers."""
        for browser in self._browsers:
            browser.close()


def open_browser(options: Mapping[str, Any], read_secret: Callable[[], bytes] = bytes) -> StoreBrowser:
    """The tiers of these options that can be looked into; the others are problems. Raises ConfigError, or ConnectorError when
    there is none."""
    tiers = parse_tiered_options(options)[1]
    check_tier_connectors(tiers)
    problems: list[str] = []
    with contextlib.ExitStack() as opened:
        browsers: dict[str, StoreBrowser] = {}
        for tier in tiers:
            try:
                browsers[tier.name] = browser = open_child(tier.connector, tier.options, read_secret)
                opened.callback(browser.close)
            except (ConfigError, ConnectorError) as error:
                problems.append(f"tier {tier.name}: {error}")
        if not browsers:
            raise ConnectorError(f"none of the tiers can be looked into: {'; '.join(problems)}")
        opened.pop_all()
    return TieredBrowser(browsers, problems)
