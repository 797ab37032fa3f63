"""Lossy: numbers of 8 bits, with one scale per channel (layer, K or V, head, place in the head) over the block's tokens.

int8 is linear; fp8 is E4M3, finer near zero and coarser at the ends. Scales are bfloat16, rounded up, so that the greatest
number of a channel is within range, whatever its magnitude.

| scales: 2 bytes for each of num_layers * 2 * num_kv_heads * head_dim channels | numbers, in the order of the block |
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from connectors.coding.codec import Codec
from core.kv.layout import KVLayout

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


class _QuantizingCodec(Codec):
    is_lossy = True
    _max_code: float  # the greatest number that a code stands for, before it is scaled

    def __init__(self, layout: KVLayout) -> None:
        self._dtype = layout.dtype
        # K and V of each layer, tokens, channels: a scale for all tokens of a channel.
        self._shape = (layout.num_layers * 2, layout.block_size, layout.num_kv_heads * layout.head_dim)
        self._num_scales = self._shape[0] * self._shape[2]
        self.encoded_bytes = 2 * self._num_scales + self._num_scales * layout.block_size

    def encode(self, payload: memoryview) -> bytes | None:
        """None for a block with numbers that are not finite."""
        numbers = _to_floats(payload, self._dtype).reshape(self._shape)
        greatest = np.maximum(numbers.max(axis=1), -numbers.min(axis=1))
        if not np.isfinite(greatest).all():  # NaN spreads through max
            return None
        scale_bits = _bfloat16_at_least(greatest / np.float32(self._max_code))
        scales = _from_bfloat16(scale_bits)
        if not np.isfinite(scales).all():
            return None
        divisors = np.where(scales == 0, np.float32(1), scales)[:, np.newaxis]
        return scale_bits.astype("<u2").tobytes() + self._to_codes(numbers / divisors).tobytes()

    def decode(self, encoded: memoryview, target: memoryview) -> bool:
        """False for a length that is not encoded_bytes."""
        if len(encoded) != self.encoded_bytes:
            return False
        scales = _from_bfloat16(np.frombuffer(encoded, dtype="<u2", count=self._num_scales)).reshape(self._shape[0], 1, -1)
        codes = np.frombuffer(encoded, dtype=np.uint8, offset=2 * self._num_scales).reshape(self._shape)
        with np.errstate(all="ignore"):  # hostile scales
            numbers = self._to_numbers(codes)
            numbers *= scales
            _write_floats(numbers, target, self._dtype)
        return True

    @abstractmethod
    def _to_codes(self, numbers: Floats) -> Codes:
        """Numbers within ±_max_code, a little more by rounding, as codes."""

    @abstractmethod
    def _to_numbers(self, codes: Codes) -> Floats:
        """A new array."""


class Int8Codec(_QuantizingCodec):
    """Whole numbers from -127 to 127."""

    name = "int8"
    number = 2
    _max_code = 127.0

    def _to_codes(self, numbers: Floats) -> Codes:
        rounded = np.rint(numbers)
        np.clip(rounded, -127, 127, out=rounded)
        return rounded.astype(np.int8).view(np.uint8)

    def _to_numbers(self, codes: Codes) -> Floats:
        return codes.view(np.int8).astype(np.float32)


class Fp8Codec(_QuantizingCodec):
    """E4M3 without infinities, as in the OCP 8-bit floating point specification: 4 bits of exponent, 3 of mantissa."""

    name = "fp8"
    number = 3
    _max_code = 448.0

    def _to_codes(self, numbers: Floats) -> Codes:
        magnitudes = np.abs(numbers)
        bits = magnitudes.view(np.int32)
        normal = bits >> np.int32(20)  # 23 bits of mantissa to three: to the nearest, ties to even
        normal &= np.int32(1)
        normal += bits
        normal += np.int32(0x7FFFF)
        normal >>= np.int32(20)
        normal -= np.int32((127 - 7) << 3)  # the exponents' biases
        np.minimum(normal, np.int32(0x7E), out=normal)  # 0x7F is NaN
        # Below the normal range, whose first code is 8, numbers are multiples of 2^-9: what adding 2^14 leaves of a float32.
        # There these codes are the greater ones; above, eight is never more than the normal code.
        magnitudes += np.float32(2**14)
        small = magnitudes.view(np.int32) - np.float32(2**14).view(np.int32)
        np.minimum(small, np.int32(8), out=small)
        codes: Codes = np.maximum(normal, small, out=small).astype(np.uint8)
        codes |= np.signbit(numbers).view(np.uint8) << np.uint8(7)
        return codes

    def _to_numbers(self, codes: Codes) -> Floats:
        numbers: Floats = _E4M3.take(codes)
        return numbers


def _e4m3_table() -> Floats:
    """A float16 has E4M3's ranges, normal and subnormal, if its numbers are taken times 2^8."""
    codes = np.arange(256, dtype=np.uint16)
    halves = ((codes & np.uint16(0x7F)) << np.uint16(7)) | (codes >> np.uint16(7) << np.uint16(15))
    return halves.view(np.float16).astype(np.float32) * np.float32(2**8)


_E4M3 = _e4m3_table()


def _to_floats(payload: memoryview, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return _from_bfloat16(np.frombuffer(payload, dtype="<u2"))
    return np.frombuffer(payload, dtype="<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _write_floats(numbers: Floats, target: memoryview, dtype: str) -> None:
    """Rounded to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = numbers.reshape(-1).view(np.uint32)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        np.copyto(np.frombuffer(target, dtype="<u2"), (bits >> np.uint32(16)).astype(np.uint16))
    elif dtype == "float16":
        np.copyto(np.frombuffer(target, dtype="<f2"), numbers.reshape(-1), casting="same_kind")
    else:
        np.copyto(np.frombuffer(target, dtype="<f4"), numbers.reshape(-1))


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _bfloat16_at_least(numbers: Floats) -> npt.NDArray[np.uint16]:
    """The bits of the least bfloat16 that is not below a number; numbers are not negative."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
