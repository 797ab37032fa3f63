"""A pool whose memory another process may read: same addresses, same content, and read-only there."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from connectors.ray.shared_pool import open_shared
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=16, dtype="float32")


def test_shared_pool_keeps_content_and_views_and_shows_later_writes() -> None:
    pool = KVPoolMemory(LAYOUT, 3)
    view = np.frombuffer(pool.buffer, dtype=np.uint8)
    pool.block(1)[:] = b"a" * LAYOUT.block_bytes
    descriptor = open_shared(pool)
    try:
        with mmap.mmap(descriptor, len(pool.buffer), prot=mmap.PROT_READ) as shared:
            start = LAYOUT.block_stride_bytes
            assert bytes(pool.block(1)) == shared[start : start + LAYOUT.block_bytes] == b"a" * LAYOUT.block_bytes
            pool.block(2)[:] = b"b" * LAYOUT.block_bytes
            assert shared[2 * start : 2 * start + 1] == b"b"
            assert view[2 * start] == ord("b")
    finally:
        os.close(descriptor)


def test_shared_pool_descriptor_does_not_allow_writing() -> None:
    descriptor = open_shared(KVPoolMemory(LAYOUT, 1))
    try:
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError):
            mmap.mmap(descriptor, 4096)
    finally:
        os.close(descriptor)


def test_shared_pool_of_several_processes_stays_their_file() -> None:
    """Other ranks have mapped it: what they write must be what the connector's readers see."""
    pool = KVPoolMemory.shared(LAYOUT, 2)
    of_another_rank = KVPoolMemory(LAYOUT, 2, pool.descriptor)
    descriptor = open_shared(pool)
    try:
        of_another_rank.block(1)[:] = b"c" * LAYOUT.block_bytes
        with mmap.mmap(descriptor, len(pool.buffer), prot=mmap.PROT_READ) as shared:
            assert shared[LAYOUT.block_stride_bytes] == ord("c")
        assert bytes(pool.block(1)) == b"c" * LAYOUT.block_bytes
        with pytest.raises(OSError):
            mmap.mmap(descriptor, 4096)
    finally:
        os.close(descriptor)
