"""The pool's memory: zeros, on page boundaries, there from the start, in huge pages where they can be had."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from core.kv.layout import PAGE_BYTES, KVLayout
from core.kv.pool_memory import KVPoolMemory

LAYOUT = KVLayout(num_layers=3, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")  # 36 KiB


def resident_kib(address: int, field: str) -> int:
    """A figure of the mapping that starts at or before an address, of this process."""
    found = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith(field + ":"):
            found += int(line.split()[1])
    return found


def test_pool_memory_is_zeros_on_page_boundaries_and_there_from_the_start() -> None:
    pool = KVPoolMemory(LAYOUT, 300)
    address = int(np.frombuffer(pool.buffer, dtype=np.uint8).ctypes.data)
    assert address % PAGE_BYTES == 0 and len(pool.buffer) == 300 * LAYOUT.block_stride_bytes
    if Path("/proc/self/smaps").exists():
        assert resident_kib(address, "Rss") * 1024 >= len(pool.buffer)
    assert not any(pool.buffer)


def test_pool_memory_shared_is_zeros_seen_by_whoever_maps_it_and_its_file_is_closed_with_it() -> None:
    pool = KVPoolMemory.shared(LAYOUT, 4)
    descriptor = pool.descriptor
    other = KVPoolMemory(LAYOUT, 4, descriptor)
    assert not any(other.buffer)
    other.block(3)[-1] = 7
    assert pool.block(3)[-1] == 7
    del pool
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert other.block(3)[-1] == 7  # the memory lives as long as somebody has it


def test_pool_memory_where_huge_pages_are_allowed_is_made_of_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel gives no huge pages")
    pool = KVPoolMemory(LAYOUT, 600)
    address = int(np.frombuffer(pool.buffer, dtype=np.uint8).ctypes.data)
    assert resident_kib(address, "AnonHugePages") > 0
