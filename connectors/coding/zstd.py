"""Lossless: the exponents of a block's numbers are compressed with zstd, their signs and mantissas stay as they are.

KV's exponents repeat. Its mantissas are as good as random: zstd gains nothing on them (measured), and side by side with them the
exponents do not compress either. A bfloat16's or float32's exponent is the high byte once the sign is turned to the low end.

| bytes per number 1 | bytes of the frame 4 | zstd frame of the high bytes | the other bytes of each number |

The frame says how long the decoded bytes are, and is not decoded when that is not what the reader wants.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt
import zstandard

from connectors.coding.codec import Codec
from core.kv.layout import DTYPE_BYTES

_HEAD = struct.Struct("<BI")
_MAX_WINDOW_BYTES = 128 * 1024 * 1024
_WORDS: dict[int, npt.DTypeLike] = {2: "<u2", 4: "<u4"}


class ZstdCodec(Codec):
    """See above."""

    name = "zstd"
    number = 1
    is_lossy = False
    encoded_bytes = None

    def __init__(self, dtype: str, level: int) -> None:
        self._word_bytes = DTYPE_BYTES[dtype]
        self._level = level
        self._thread = threading.local()  # a compressor must not be used by two threads at once

    def encode(self, payload: memoryview) -> bytes | None:
        """None when the block would not shrink."""
        words = np.frombuffer(payload, dtype=_WORDS[self._word_bytes])
        turned = words << 1
        turned |= words >> (8 * self._word_bytes - 1)
        places = turned.view(np.uint8).reshape(-1, self._word_bytes)
        high = (turned >> (8 * (self._word_bytes - 1))).astype(np.uint8)
        compressor = getattr(self._thread, "compressor", None)
        if compressor is None:
            compressor = self._thread.compressor = zstandard.ZstdCompressor(level=self._level)
        frame: bytes = compressor.compress(high.data)
        num_bytes = _HEAD.size + len(frame) + len(payload) - len(places)
        if num_bytes >= len(payload):
            return None
        return b"".join((_HEAD.pack(self._word_bytes, len(frame)), frame, np.ascontiguousarray(places[:, :-1]).data))

    def decode(self, encoded: memoryview, target: memoryview) -> bool:
        """Of any of the word sizes, whatever this codec's own is."""
        if len(encoded) < _HEAD.size:
            return False
        word_bytes, frame_bytes = _HEAD.unpack_from(encoded)
        if word_bytes not in _WORDS or len(target) % word_bytes:
            return False
        num_words = len(target) // word_bytes
        frame, rest = encoded[_HEAD.size : _HEAD.size + frame_bytes], encoded[_HEAD.size + frame_bytes :]
        if len(rest) != len(target) - num_words:
            return False
        high = _decompress(frame, num_words)
        if high is None:
            return False
        turned = np.empty(num_words, dtype=_WORDS[word_bytes])
        places = turned.view(np.uint8).reshape(-1, word_bytes)
        places[:, :-1] = np.frombuffer(rest, dtype=np.uint8).reshape(num_words, word_bytes - 1)
        places[:, -1] = np.frombuffer(high, dtype=np.uint8)
        words = np.frombuffer(target, dtype=_WORDS[word_bytes])
        np.right_shift(turned, 1, out=words)
        turned <<= 8 * word_bytes - 1
        words |= turned
        return True


def _decompress(frame: memoryview, num_bytes: int) -> bytes | None:
    """None unless the frame says that it is of exactly that size, and is."""
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            return None
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        found: bytes = decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return found if len(found) == num_bytes else None
