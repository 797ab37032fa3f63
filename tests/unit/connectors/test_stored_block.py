"""Headers of blocks at rest: what verifies, and that nothing else does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header

LAYOUT, OTHER_LAYOUT = bytes(range(16)), bytes(range(1, 17))
NAME, OTHER_NAME = b"n" * 16, b"m" * 16
PAYLOAD = bytes(range(256)) * 4


def test_check_block_of_its_own_header_is_ok() -> None:
    header = pack_block_header(LAYOUT, NAME, PAYLOAD)
    assert len(header) == BLOCK_HEADER_BYTES == 64
    assert check_block(header, PAYLOAD, LAYOUT, NAME) is BlockCheck.OK


def test_check_block_of_another_block_or_layout_is_a_miss() -> None:
    header = pack_block_header(LAYOUT, NAME, PAYLOAD)
    assert check_block(header, PAYLOAD, LAYOUT, OTHER_NAME) is BlockCheck.MISS
    assert check_block(header, PAYLOAD, OTHER_LAYOUT, NAME) is BlockCheck.MISS


def test_check_block_never_written_is_a_miss() -> None:
    assert check_block(bytes(64), bytes(1024), LAYOUT, NAME) is BlockCheck.MISS


def test_check_block_of_a_short_header_or_payload_is_corrupt() -> None:
    header = pack_block_header(LAYOUT, NAME, PAYLOAD)
    assert check_block(header[:-1], PAYLOAD, LAYOUT, NAME) is BlockCheck.CORRUPT
    assert check_block(b"", PAYLOAD, LAYOUT, NAME) is BlockCheck.CORRUPT
    assert check_block(header, PAYLOAD[:-1], LAYOUT, NAME) is BlockCheck.CORRUPT


@given(st.integers(0, (BLOCK_HEADER_BYTES + len(PAYLOAD)) * 8 - 1))
def test_check_block_with_any_bit_flipped_is_corrupt(bit: int) -> None:
    stored = bytearray(pack_block_header(LAYOUT, NAME, PAYLOAD) + PAYLOAD)
    stored[bit // 8] ^= 1 << bit % 8
    assert check_block(bytes(stored[:64]), bytes(stored[64:]), LAYOUT, NAME) is BlockCheck.CORRUPT


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_check_block_of_any_bytes_is_never_ok(header: bytes, payload: bytes) -> None:
    assert check_block(header, payload, LAYOUT, NAME) is not BlockCheck.OK
