"""Exports of blocks: what was written comes back, and what is cut or changed is noticed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.block_stream import BlockStreamError, BlockStreamWriter, read_block_stream
from connectors.store_browser import RawBlock, find_fault
from connectors.stored_block import pack_block_header

LAYOUT = b"l" * 16


def block(number: int, num_bytes: int = 100) -> RawBlock:
    payload = bytes([number]) * num_bytes
    return RawBlock(pack_block_header(LAYOUT, bytes([number]) * 16, payload), payload)


def stream(num_blocks: int) -> bytes:
    file = io.BytesIO()
    writer = BlockStreamWriter(file)
    for number in range(num_blocks):
        writer.write(block(number, 100 * number), 1000.5 + number if number else None)
    writer.finish()
    return file.getvalue()


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_stream_comes_back_as_it_was_written(num_blocks: int) -> None:
    records = list(read_block_stream(io.BytesIO(stream(num_blocks))))
    assert [record.block for record in records] == [block(number, 100 * number) for number in range(num_blocks)]
    assert [record.last_used_s for record in records] == [None, 1001.5, 1002.5, 1003.5, 1004.5][:num_blocks]


def test_stream_cut_anywhere_is_noticed() -> None:
    whole = stream(4)
    for end in range(len(whole)):
        with pytest.raises(BlockStreamError):
            list(read_block_stream(io.BytesIO(whole[:end])))


def test_stream_without_a_record_in_the_middle_is_noticed() -> None:
    whole, record = stream(2), 20 + 64
    with pytest.raises(BlockStreamError, match="blocks are missing or changed: it has 1, and was written with 2"):
        list(read_block_stream(io.BytesIO(whole[:8] + whole[8 + record :])))


@given(st.data())
def test_stream_with_any_bytes_changed_yields_no_wrong_block(data: st.DataObject) -> None:
    changed = bytearray(stream(4))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=8))
    good = {block(number, 100 * number).header: block(number, 100 * number) for number in range(4)}
    try:
        for record in read_block_stream(io.BytesIO(bytes(changed))):
            name = record.block.header[24:40]
            if not find_fault(record.block, LAYOUT, name):
                assert record.block == good[record.block.header]
    except BlockStreamError:
        pass


@given(st.binary(max_size=300))
def test_stream_of_any_bytes_is_refused(content: bytes) -> None:
    with pytest.raises(BlockStreamError):
        list(read_block_stream(io.BytesIO(content)))
