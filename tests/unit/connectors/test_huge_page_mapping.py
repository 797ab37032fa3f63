"""connectors/slots/huge_page_mapping.py on real memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.slots.huge_page_mapping import HUGE_PAGE_BYTES, HugePageMapping

_NUM_BYTES = 3 * HUGE_PAGE_BYTES + 4096
_NAME = "kvrelay-test-huge"


@pytest.fixture
def descriptor() -> Iterator[int]:
    created = os.memfd_create(_NAME)
    os.ftruncate(created, _NUM_BYTES)
    yield created
    os.close(created)


def test_mapping_two_of_one_descriptor_share_bytes_to_the_last_one(descriptor: int) -> None:
    first, second = HugePageMapping(descriptor, _NUM_BYTES), HugePageMapping(descriptor, _NUM_BYTES)
    first.bytes[-1] = 7
    second.populate(0, _NUM_BYTES)
    first.bytes[HUGE_PAGE_BYTES] = 9
    assert (second.bytes[-1], second.bytes[HUGE_PAGE_BYTES], int(second.bytes.max())) == (7, 9, 9)


def test_mapping_array_outlives_its_mapping_object(descriptor: int) -> None:
    kept = HugePageMapping(descriptor, _NUM_BYTES).bytes[HUGE_PAGE_BYTES:]
    kept[0] = 5
    assert os.pread(descriptor, 1, HUGE_PAGE_BYTES) == b"\5"


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="needs MADV_COLLAPSE",
)
def test_populate_where_the_kernel_is_linux_6_1_or_newer_uses_huge_pages(descriptor: int) -> None:
    mapping = HugePageMapping(descriptor, _NUM_BYTES)
    mapping.populate(0, _NUM_BYTES)
    (pages,) = [part for part in Path("/proc/self/smaps").read_text().split("VmFlags") if _NAME in part]
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", pages)
    assert found is not None and int(found[1]) * 1024 >= 2 * HUGE_PAGE_BYTES  # one may be missing when memory is in pieces
