"""Looks into a Redis store: keys are scanned, and values read, by an ordinary client in small pipelines.

What Redis knows of a block's use is when it expires; the last use is that less this process' own expiry_s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.redis.server import RedisServer
from connectors.redis.values import HASH_TAG, KEY_VERSION, MAX_PARTS, cut_payload
from connectors.store_browser import BlockEntry, RawBlock, StoreBrowser, WriteOutcome, in_batches
from connectors.stored_block import BLOCK_HEADER_BYTES, read_block_header

_KEYS_AT_A_TIME = 512


@dataclass(frozen=True, slots=True)
class _Found:
    """What a block's keys were when it was listed."""

    keys: tuple[bytes, ...]


class RedisBrowser(StoreBrowser):
    """One namespace of one server or cluster, in all layouts."""

    def __init__(self, server: RedisServer, namespace: str, expiry_s: float) -> None:
        """Raises ConnectorError where the server cannot be reached."""
        super().__init__()
        self._client = server.open_client()
        self._expiry_s = expiry_s
        self._prefix = f"{namespace}:{KEY_VERSION}:".encode()
        # The hash, and behind a colon the number of a part that is not the first.
        self._before, self._after = HASH_TAG if server.is_cluster else (b"", b"")
        block_hash = re.escape(self._before) + rb"([0-9a-f]{32})" + re.escape(self._after)
        self._key = re.compile(re.escape(self._prefix) + rb"([0-9a-f]{32}):" + block_hash + rb"(?::([1-9]))?")
        self._capacity_bytes = self._client.max_memory_bytes()

    @property
    def capacity_bytes(self) -> int:
        """The server's maxmemory, which others may share."""
        return self._capacity_bytes

    def entries(self) -> Iterator[BlockEntry]:
        """By SCAN: a key that stays from begin to end is listed, perhaps twice where the server rehashes, which we undo."""
        seen: set[bytes] = set()
        for keys in self._client.scan(self._prefix + b"*", _KEYS_AT_A_TIME):
            names = []
            for key in keys:
                match = self._key.fullmatch(key)
                if match is None:
                    self._note_foreign(key)
                elif match[3] is None and key not in seen:
                    seen.add(key)
                    names.append((bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode()), key))
            yield from self._look_up(names)

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """By the first key of each block; a value of another type is no block."""
        keys = [self._block_key(layout_fingerprint, name) for name in block_hashes]
        found: list[bool] = []
        for start in range(0, len(keys), _KEYS_AT_A_TIME):
            found += [
                _number(reply) > 0
                for reply in self._client.ask([(b"STRLEN", key) for key in keys[start : start + _KEYS_AT_A_TIME]])
            ]
        return found

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """All parts of a block, put together."""
        for batch in in_batches(entries):
            keys = [key for entry in batch for key in entry.handle.keys]
            values = iter(self._client.ask([(b"GET", key) for key in keys]))
            for entry in batch:
                parts = [next(values) for _ in entry.handle.keys]
                if any(part is None for part in parts):
                    yield entry, None
                    continue
                strings = [part for part in parts if isinstance(part, bytes)]
                value = b"".join(strings) if len(strings) == len(parts) else b""  # of another type: no block
                yield entry, RawBlock(value[:BLOCK_HEADER_BYTES], value[BLOCK_HEADER_BYTES:])

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """The last block expires last."""
        base_ms = int((time.time() + self._expiry_s) * 1000) - len(blocks)
        commands: list[tuple[bytes, ...]] = []
        num_parts = []
        for position, block in enumerate(blocks):
            header = read_block_header(block.header)
            assert header is not None, "only verified blocks are written"
            key = self._block_key(header.layout_fingerprint, header.block_hash)
            moment = b"%d" % (base_ms + position)
            parts = [block.payload[part] for part in cut_payload(block.header, block.payload)]
            values = [block.header + parts[0], *parts[1:]]
            keys = [key, *(b"%b:%d" % (key, number) for number in range(1, len(parts)))]
            commands += [(b"SET", name, value, b"NX", b"PXAT", moment) for name, value in zip(keys, values, strict=True)]
            num_parts.append(len(parts))
        outcomes, replies = [], iter(self._client.ask(commands))
        for count in num_parts:
            answers = [next(replies) for _ in range(count)]
            if any(isinstance(answer, Exception) for answer in answers):
                outcomes.append(WriteOutcome.NO_ROOM)
            else:
                outcomes.append(WriteOutcome.PRESENT if answers[0] is None else WriteOutcome.WRITTEN)
        return outcomes

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """Freed by the server in the background. A block that was written again meanwhile goes too: that costs a miss."""
        num_removed = 0
        for start in range(0, len(entries), _KEYS_AT_A_TIME):
            commands = [(b"UNLINK", *entry.handle.keys) for entry in entries[start : start + _KEYS_AT_A_TIME]]
            num_removed += sum(isinstance(reply, int) and reply > 0 for reply in self._client.ask(commands))
        return num_removed

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _block_key(self, layout_fingerprint: bytes, block_hash: bytes) -> bytes:
        name = self._before + block_hash.hex().encode() + self._after
        return self._prefix + layout_fingerprint.hex().encode() + b":" + name

    def _note_foreign(self, key: bytes) -> None:
        note = f"a key of this namespace is no block's: {key[:200]!r}"
        if len(self.notes) < 10 and note not in self.notes:
            self.notes.append(note)

    def _look_up(self, names: Sequence[tuple[bytes, bytes, bytes]]) -> Iterator[BlockEntry]:
        commands: list[tuple[bytes, ...]] = []
        for _fingerprint, _name, key in names:
            parts = [key, *(b"%b:%d" % (key, number) for number in range(1, MAX_PARTS))]
            commands += [(b"PEXPIRETIME", key), (b"PTTL", key), *((b"STRLEN", part) for part in parts)]
        replies = iter(self._client.ask(commands))
        for fingerprint, name, key in names:
            expiry_ms, left_ms = _number(next(replies)), _number(next(replies))
            if expiry_ms == 0 < left_ms:  # a server before 7.0 tells the time that is left, and a millisecond less each time
                expiry_ms = int(time.time() * 1000) + left_ms
            lengths = [next(replies) for _ in range(MAX_PARTS)]
            if lengths[0] == 0:  # gone meanwhile
                continue
            # An empty part is found by reading. A refusal is that of a value of another type, which is to be seen and removed.
            num_parts = 1 + sum(length != 0 for length in lengths[1:])
            expires_s = expiry_ms / 1000 if expiry_ms > 0 else None
            yield BlockEntry(
                layout_fingerprint=fingerprint,
                block_hash=name,
                num_bytes=sum(map(_number, lengths)),
                eviction_order=expiry_ms if expiry_ms > 0 else 2**62,  # nothing that never expires is evicted
                place=key.decode(),
                last_used_s=None if expires_s is None else expires_s - self._expiry_s,
                expires_s=expires_s,
                handle=_Found((key, *(b"%b:%d" % (key, number) for number in range(1, num_parts)))),
            )


def _number(reply: Any) -> int:
    """A reply that should be one; 0 for a refusal, such as that of a key of another type."""
    return reply if isinstance(reply, int) else 0
