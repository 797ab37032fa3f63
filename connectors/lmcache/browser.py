"""Looks into LMCache's file tier as our connector fills it, without LMCache: a folder per layout, of files of a few blocks.

What is written and removed here, engines find at their next look into the folder. They may still have it in memory, which their
index, the folder's listing, does not lead them to.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connectors.file_lock import Lease
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT, ObjectDirectory, StoredObject
from connectors.lmcache.object_files import file_name, open_scratch, parse_file_name
from connectors.lmcache.options import IN_PROCESS, SERVER, parse_options
from connectors.store_browser import MAX_BLOCK_BYTES, BlockEntry, RawBlock, StoreBrowser, WriteOutcome
from connectors.stored_block import BLOCK_HEADER_BYTES, read_block_header
from core.errors import ConfigError, ConnectorError

_MAX_PROBED_FILES = 64


class _Place(NamedTuple):
    """A block that was listed: its file, which is another one when its inode is, and its position there."""

    text: str
    inode: int
    position: int


class _Layout:
    """The folder of one layout. unit_bytes: a block with its header; 0 while no file tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fingerprint = bytes.fromhex(folder.name)
        self.directory = ObjectDirectory(folder, file_name, parse_file_name)
        self.unit_bytes = self._find_unit()
        self._scratch: tuple[Path, Lease] | None = None

    def _find_unit(self) -> int:
        """From the first header that is intact. Raises OSError."""
        for path in itertools.islice(self.folder.glob("*.data"), _MAX_PROBED_FILES):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # engines evict meanwhile
                header = read_block_header(file.read(BLOCK_HEADER_BYTES))
                if header is not None and 0 < header.payload_bytes <= MAX_BLOCK_BYTES:
                    return BLOCK_HEADER_BYTES + header.payload_bytes
        return 0

    def objects(self) -> Iterator[tuple[str, StoredObject, os.stat_result]]:
        """Files, what they hold, and their state. Raises OSError."""
        texts = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208 (many names, and no use for paths)
        for text in texts:
            name = parse_file_name(text)
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if name is not None:
                    yield text, StoredObject(name), (self.folder / text).stat()

    def write(self, name: bytes, content: bytes, used_at_ns: int | None = None) -> None:
        """A file appears under its name when it is complete, as one that was last used then (None: now). Raises OSError."""
        if self._scratch is None:
            self._scratch = open_scratch(self.folder)
        unfinished = self._scratch[0] / "object"
        unfinished.write_bytes(content)
        if used_at_ns is not None:
            os.utime(unfinished, ns=(used_at_ns, used_at_ns))
        unfinished.replace(self.folder / file_name(name))

    def close(self) -> None:
        """Safe to repeat."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with contextlib.suppress(OSError):
                scratch[1].release()
            shutil.rmtree(scratch[0], ignore_errors=True)


class LMCacheBrowser(StoreBrowser):
    """All layouts below a path."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        """capacity_bytes: of one layout. Raises ConnectorError."""
        super().__init__()
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._layouts: dict[bytes, _Layout] = {}
        with _translated():
            if not path.is_dir():
                self.missing.append(f"there is no store in {path}")
                return
            for folder in sorted(path.iterdir()):
                if re.fullmatch("[0-9a-f]{32}", folder.name) and folder.is_dir():
                    self._layouts[bytes.fromhex(folder.name)] = _Layout(folder)

    @property
    def capacity_bytes(self) -> int:
        """Of all layouts together."""
        return self._capacity_bytes * max(1, len(self._layouts))

    def entries(self) -> Iterator[BlockEntry]:
        """A file goes as a whole; a prefix, from its end."""
        for layout in self._layouts.values():
            with _translated():
                listed = list(layout.objects())
            for text, stored, state in listed:
                num_bytes = layout.unit_bytes or state.st_size // stored.num_blocks
                for position, block_hash in enumerate(stored.block_hashes):
                    yield BlockEntry(
                        layout_fingerprint=layout.fingerprint,
                        block_hash=block_hash,
                        num_bytes=num_bytes,
                        eviction_order=state.st_mtime_ns * MAX_BLOCKS_PER_OBJECT - position,
                        place=f"block {position + 1} of {stored.num_blocks} in the file of {stored.block_hashes[0].hex()}",
                        last_used_s=state.st_mtime,
                        handle=_Place(text, state.st_ino, position),
                    )

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """From the names of files."""
        layout = self._layouts.get(layout_fingerprint)
        if layout is None:
            return [False] * len(block_hashes)
        with _translated():
            layout.directory.refresh()
        return [layout.directory.find(name) is not None for name in block_hashes]

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """One block at a time; a file that is another one meanwhile has lost them all."""
        for (fingerprint, text), of_file in itertools.groupby(entries, key=_file_of):
            layout = self._layouts[fingerprint]
            with contextlib.ExitStack() as opened, _translated():
                try:
                    file = opened.enter_context((layout.folder / text).open("rb"))
                except FileNotFoundError:
                    yield from ((entry, None) for entry in of_file)
                    continue
                inode = os.fstat(file.fileno()).st_ino
                for entry in of_file:
                    place: _Place = entry.handle
                    value = os.pread(file.fileno(), entry.num_bytes, place.position * entry.num_bytes)
                    block = RawBlock(value[:BLOCK_HEADER_BYTES], value[BLOCK_HEADER_BYTES:])
                    yield entry, block if place.inode == inode else None

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Makes the folder of a layout that is not there. Neighbours come into one file, the last one first, as in a prefix."""
        outcomes = dict.fromkeys(range(len(blocks)), WriteOutcome.OTHER_SIZE)
        by_layout: dict[bytes, dict[int, bytes]] = {}
        for position, block in enumerate(blocks):
            header = read_block_header(block.header)
            assert header is not None, "only verified blocks are written"
            by_layout.setdefault(header.layout_fingerprint, {})[position] = header.block_hash
        for fingerprint, names in by_layout.items():
            with _translated():
                layout = self._layouts.get(fingerprint) or _Layout(self._path / fingerprint.hex())
                self._layouts[fingerprint] = layout
                layout.unit_bytes = layout.unit_bytes or blocks[next(iter(names))].num_bytes
                fitting = {at: name for at, name in names.items() if blocks[at].num_bytes == layout.unit_bytes}
                outcomes.update(self._write(layout, fitting, blocks))
        return list(outcomes.values())

    def _write(self, layout: _Layout, names: Mapping[int, bytes], blocks: Sequence[RawBlock]) -> dict[int, WriteOutcome]:
        directory = layout.directory
        directory.refresh()
        outcomes = {at: WriteOutcome.PRESENT for at, name in names.items() if directory.find(name) is not None}
        new = {name: at for at, name in names.items() if at not in outcomes}  # the later, if one is there twice
        newest_first = list(new)[::-1]
        room = self._make_room(layout, len(newest_first), list(names.values()))
        for start in range(0, room, MAX_BLOCKS_PER_OBJECT):
            group = newest_first[start : min(start + MAX_BLOCKS_PER_OBJECT, room)]
            object_name = b"".join(group)
            layout.write(object_name, b"".join(blocks[new[name]].header + blocks[new[name]].payload for name in group))
            directory.add([object_name])
        directory.touch(newest_first[:room])
        written = set(newest_first[:room])
        outcomes |= {
            at: WriteOutcome.WRITTEN if name in written else WriteOutcome.NO_ROOM
            for at, name in names.items()
            if at not in outcomes
        }
        return outcomes

    def _make_room(self, layout: _Layout, num_blocks: int, spared: Sequence[bytes]) -> int:
        """Evict what was used longest ago, as the connector does; for how many of the blocks there is room now."""
        capacity = self._capacity_bytes // layout.unit_bytes
        excess = layout.directory.num_blocks + num_blocks - capacity
        for name in layout.directory.pick_oldest(excess, spared) if excess > 0 else ():
            (layout.folder / file_name(name)).unlink(missing_ok=True)
            layout.directory.remove(name)
        return max(0, min(num_blocks, capacity - layout.directory.num_blocks))

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """A file that holds other blocks, too, is written anew without these."""
        by_file: dict[tuple[bytes, str], list[_Place]] = {}
        for entry in entries:
            by_file.setdefault(_file_of(entry), []).append(entry.handle)
        num_removed = 0
        for (fingerprint, text), places in by_file.items():
            with _translated():
                num_removed += self._remove(self._layouts[fingerprint], text, places)
        return num_removed

    def _remove(self, layout: _Layout, text: str, places: Sequence[_Place]) -> int:
        path, name = layout.folder / text, parse_file_name(text)
        assert name is not None, "it was listed"
        try:
            file = path.open("rb")  # engines evict and write meanwhile: from here on it is one file, and stays
        except FileNotFoundError:
            return 0
        with file:
            state = os.fstat(file.fileno())
            gone = {place.position for place in places if place.inode == state.st_ino}
            if not gone:
                return 0
            content = file.read()
        num_bytes = layout.unit_bytes or state.st_size // StoredObject(name).num_blocks
        kept = {
            block_hash: content[start : start + num_bytes]
            for position, block_hash in enumerate(StoredObject(name).block_hashes)
            if position not in gone and (start := position * num_bytes) + num_bytes <= len(content)
        }
        if kept:
            layout.write(b"".join(kept), b"".join(kept.values()), state.st_mtime_ns)
        path.unlink(missing_ok=True)
        return len(gone)

    def close(self) -> None:
        """Remove what was only needed for writing."""
        for layout in self._layouts.values():
            layout.close()


def _file_of(entry: BlockEntry) -> tuple[bytes, str]:
    place: _Place = entry.handle
    return entry.layout_fingerprint, place.text


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectorError(f"the store cannot be used: {error}") from error


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """The files below the options' path. Raises ConfigError or ConnectorError."""
    if options.get("mode") == SERVER:
        allowed = f"{IN_PROCESS}, whose files can be looked into: an LMCache server has its own tools for what it holds"
        raise ConfigError("connector.options.mode", SERVER, allowed)
    parsed = parse_options(options)
    return LMCacheBrowser(Path(parsed.path).absolute(), parsed.file_capacity_bytes)
