"""Objects that stores grow by: made when they are needed, not asked for when Ray fails or hangs, and let go of at the end."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np

from connectors.contract.node import HANG_S, wait_until
from connectors.ray.index import StoreIndex
from connectors.ray.slabs import ObjectMedium, SlabMaker
from connectors.stored_block import BLOCK_HEADER_BYTES

BLOCK_BYTES = 1024 * 1024 - BLOCK_HEADER_BYTES
NUM_BYTES = 64 * 1024 * 1024


class Handle:
    """What keeps an object."""


class StubMedium(ObjectMedium):
    """Hangs while may_go is not set; raises while it is_broken."""

    descriptor = -1
    num_bytes = NUM_BYTES

    def __init__(self) -> None:
        self.memory = np.zeros(NUM_BYTES, dtype=np.uint8)
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_broken = False
        self.num_calls = 0
        self.handles: list[weakref.ref[Handle]] = []

    def make(self, num_bytes: int) -> tuple[Any, int] | None:
        self.num_calls += 1
        assert self.may_go.wait(HANG_S)
        if self.is_broken:
            raise RuntimeError("no")
        handle = Handle()
        self.handles.append(weakref.ref(handle))
        return handle, len(self.handles) * 4 * 1024 * 1024


class Rig:
    def __init__(self, max_bytes: int = NUM_BYTES) -> None:
        self.medium = StubMedium()
        self.mutex = threading.Lock()
        self.indexes = [StoreIndex(NUM_BYTES, BLOCK_BYTES, 4 * 1024 * 1024) for _ in range(2)]
        self.maker = SlabMaker(self.medium, max_bytes, self.mutex, lambda: self.indexes)


def test_ray_slabs_store_grows_to_what_a_writer_needs_and_has_some_ahead() -> None:
    rig = Rig()
    assert rig.maker.grow(rig.indexes[0], 6, HANG_S)
    assert rig.indexes[0].num_free >= 6
    with rig.mutex:
        rig.indexes[0].take(rig.indexes[0].num_free)
        rig.maker.wake()
    wait_until(lambda: rig.indexes[0].num_free > 0)


def test_ray_slabs_stores_share_what_there_is() -> None:
    rig = Rig(max_bytes=6 * 1024 * 1024)
    assert rig.maker.grow(rig.indexes[0], 4, HANG_S)
    assert rig.maker.grow(rig.indexes[1], 4, HANG_S)
    assert sum(index.num_bytes for index in rig.indexes) == 6 * 1024 * 1024
    num_calls = rig.medium.num_calls
    assert rig.maker.grow(rig.indexes[1], 20, HANG_S)
    assert rig.medium.num_calls == num_calls


def test_ray_slabs_hanging_ray_is_waited_for_by_one_writer_and_for_a_while_by_no_other() -> None:
    rig = Rig()
    rig.medium.may_go.clear()
    first = threading.Thread(target=rig.maker.grow, args=(rig.indexes[0], 1, HANG_S))
    first.start()
    wait_until(lambda: rig.medium.num_calls == 1)
    assert not rig.maker.grow(rig.indexes[1], 1, 0.05)
    started_s = time.monotonic()
    assert rig.maker.grow(rig.indexes[1], 1, HANG_S)
    assert time.monotonic() - started_s < HANG_S
    assert rig.indexes[1].num_free == 0
    rig.medium.may_go.set()
    first.join(HANG_S)
    assert rig.indexes[0].num_free > 0


def test_ray_slabs_ray_that_fails_is_not_asked_again_at_once() -> None:
    rig = Rig()
    rig.medium.is_broken = True
    assert rig.maker.grow(rig.indexes[0], 4, HANG_S)
    assert rig.maker.grow(rig.indexes[0], 4, HANG_S)
    assert (rig.indexes[0].num_free, rig.medium.num_calls) == (0, 1)
    rig.medium.is_broken = False

    def has_grown() -> bool:
        rig.maker.grow(rig.indexes[0], 4, HANG_S)
        return rig.indexes[0].num_free >= 4

    wait_until(has_grown)


def test_ray_slabs_of_a_store_that_has_ended_are_let_go_of_even_when_made_afterwards() -> None:
    rig = Rig()
    rig.maker.grow(rig.indexes[0], 4, HANG_S)
    rig.medium.may_go.clear()
    late = threading.Thread(target=rig.maker.grow, args=(rig.indexes[0], 8, HANG_S))
    late.start()
    wait_until(lambda: rig.medium.num_calls == 2)
    with rig.mutex:
        rig.maker.drop(rig.indexes[0])
    rig.medium.may_go.set()
    late.join(HANG_S)
    wait_until(lambda: len(rig.medium.handles) == 2 and all(handle() is None for handle in rig.medium.handles))
