"""Files in memory, mapped at huge pages' boundaries: the same bytes, whatever pages they are in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.huge_pages import HUGE_PAGE_BYTES, collapse, map_file, populate

NAME = "kvrelay-test-huge"
NUM_BYTES = 3 * HUGE_PAGE_BYTES + 5000


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create(NAME)
    os.ftruncate(descriptor, NUM_BYTES)
    yield descriptor
    os.close(descriptor)


def test_huge_pages_mappings_of_one_file_are_aligned_and_show_the_same_before_and_after_a_collapse(descriptor: int) -> None:
    writer, reader = map_file(descriptor, NUM_BYTES, is_writable=True), map_file(descriptor, NUM_BYTES)
    assert writer.ctypes.data % HUGE_PAGE_BYTES == reader.ctypes.data % HUGE_PAGE_BYTES == 0
    content = np.arange(NUM_BYTES, dtype=np.uint8)
    writer[:] = content
    assert np.array_equal(reader, content)
    collapse(writer[100:])  # or not: the system may refuse
    assert np.array_equal(reader, content)
    writer[-1] = 7
    assert (reader[-1], os.pread(descriptor, 1, NUM_BYTES - 1)) == (7, b"\7")
    assert not reader.flags.writeable


def test_huge_pages_mapping_lives_as_long_as_a_view_of_it(descriptor: int) -> None:
    view = map_file(descriptor, NUM_BYTES, is_writable=True)[-10:]
    view[:] = 1
    assert os.pread(descriptor, 1, NUM_BYTES - 1) == b"\1"


def test_huge_pages_file_that_is_too_small_is_refused(descriptor: int) -> None:
    for num_bytes in (0, NUM_BYTES + 1):
        with pytest.raises(OSError, match=str(NUM_BYTES)):
            map_file(descriptor, num_bytes)


def test_huge_pages_collapse_that_has_no_time_left_says_so(descriptor: int) -> None:
    memory = map_file(descriptor, NUM_BYTES, is_writable=True)
    assert not collapse(memory, timeout_s=0.0)
    assert collapse(memory[:5000], timeout_s=0.0)  # less than one: nothing to be done


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="needs MADV_COLLAPSE",
)
def test_huge_pages_populate_where_the_kernel_is_linux_6_1_or_newer_uses_them(descriptor: int) -> None:
    memory = map_file(descriptor, NUM_BYTES, is_writable=True)
    populate(memory)
    (pages,) = [part for part in Path("/proc/self/smaps").read_text().split("VmFlags") if NAME in part]
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", pages)
    assert found is not None and int(found[1]) * 1024 >= HUGE_PAGE_BYTES  # one may be missing when memory is in pieces
