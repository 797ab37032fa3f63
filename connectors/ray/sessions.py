"""Who uses a directory: its open stores, the connections to each, and what these say of themselves in HELLO. Knows no Ray."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.ray.index import Place, StoreIndex
from connectors.ray.messages import FrameStream
from core.errors import ConnectorError


@dataclass(eq=False, slots=True)
class BorrowedBlocks:
    """Blocks of another node's directory, brought to this node: name to offset and header; keeper holds them there."""

    places: dict[bytes, tuple[int, bytes]]
    keeper: Any


@dataclass(frozen=True, slots=True)
class Hello:
    """What a connection says of itself. key: of its store. is_visitor: it only looks in (see visits.py)."""

    key: str
    fingerprint: bytes
    block_bytes: int
    stride_bytes: int
    num_blocks: int
    capacity_bytes: int
    object_bytes: int
    linger_s: float
    op_timeout_s: float
    is_visitor: bool


def parse_hello(body: bytes) -> Hello:
    """Raises ConnectorError."""
    try:
        hello = json.loads(body)
        fingerprint = bytes.fromhex(hello["layout"])
        key = f"{hello['namespace']}/{fingerprint.hex()}"
        return Hello(
            key,
            fingerprint,
            block_bytes=int(hello["block_bytes"]),
            stride_bytes=int(hello["stride_bytes"]),
            num_blocks=int(hello["num_blocks"]),
            capacity_bytes=int(hello["capacity_bytes"]),
            object_bytes=int(hello["object_bytes"]),
            linger_s=float(hello["linger_s"]),
            op_timeout_s=float(hello["op_timeout_s"]),
            is_visitor=bool(hello.get("visitor", False)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectorError(f"HELLO is not understood: {error!r}") from error


@dataclass(eq=False, slots=True)
class OpenStore:
    """A store with those who use it. The caller holds the directory's lock."""

    index: StoreIndex
    linger_s: float
    num_connections: int = 0
    unused_since_s: float = field(default_factory=time.monotonic)
    visitors: set[Session] = field(default_factory=set)  # who keep it only while they copy

    def is_unused(self, now_s: float) -> bool:
        """For long enough to end."""
        is_open = self.num_connections > 0 or any(visitor.pins for visitor in self.visitors)
        return not is_open and now_s - self.unused_since_s >= self.linger_s


@dataclass(eq=False, slots=True)
class Session:
    """One connection, after its HELLO. pool: what it writes from, if anything; a visitor with one keeps its store as an engine
    does."""

    stream: FrameStream
    hello: Hello
    store: OpenStore
    pool: npt.NDArray[np.uint8] | None
    pins: list[Place] = field(default_factory=list)
    borrowed: BorrowedBlocks | None = None
    listed: list[bytes] = field(default_factory=list)  # by a visitor

    @property
    def has_store_memory(self) -> bool:
        """Whether it moves blocks, or only asks."""
        return self.pool is not None or self.hello.is_visitor

    def join(self) -> None:
        """Its store counts it from now on. The caller holds the directory's lock, as for the others."""
        if self.hello.is_visitor and self.pool is None:
            self.store.visitors.add(self)
        else:
            self.store.num_connections += 1

    def release(self) -> None:
        """The blocks that it copied. Safe to repeat."""
        for place in self.pins:
            self.store.index.unpin(place)
        self.pins.clear()
        self.borrowed = None

    def leave(self) -> None:
        """The end of join()."""
        self.release()
        if self in self.store.visitors:
            self.store.visitors.remove(self)
            return
        self.store.num_connections -= 1
        self.store.unused_since_s = time.monotonic()
