"""Lossless: a block's bytes are sorted by their place in the number, and compressed with zstd.

KV's exponents repeat, its mantissas hardly do. Side by side neither compresses; apart, the exponents shrink to a fraction.
The frame says how long the decoded bytes are, and is not decoded when that is not what the reader wants.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from connectors.codec import Codec
from core.kv.layout import DTYPE_BYTES

MIN_LEVEL, MAX_LEVEL = 1, 19
_MAX_WINDOW_BYTES = 128 * 1024 * 1024


class ZstdCodec(Codec):
    """| bytes per number 1 | zstd frame of the planes |"""

    name = "zstd"
    number = 1
    is_lossy = False
    encoded_bytes = None

    def __init__(self, dtype: str, level: int) -> None:
        self._num_planes = DTYPE_BYTES[dtype]
        self._level = level
        self._thread = threading.local()  # compressors must not be used by two threads at once

    def encode(self, payload: memoryview) -> bytes | None:
        """None when the block would not shrink."""
        numbers = np.frombuffer(payload, dtype=np.uint8).reshape(-1, self._num_planes)
        compressor = getattr(self._thread, "compressor", None)
        if compressor is None:
            compressor = self._thread.compressor = zstandard.ZstdCompressor(level=self._level)
        frame: bytes = compressor.compress(np.ascontiguousarray(numbers.T).data)
        return bytes([self._num_planes]) + frame if 1 + len(frame) < len(payload) else None

    def decode(self, encoded: memoryview, target: memoryview) -> bool:
        """Any number of planes that divides the block."""
        num_planes = encoded[0] if len(encoded) else 0
        if num_planes not in DTYPE_BYTES.values() or len(target) % num_planes:
            return False
        frame = encoded[1:]
        try:
            if zstandard.frame_content_size(frame) != len(target):
                return False
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            planes = decompressor.decompress(frame, max_output_size=len(target), allow_extra_data=False)
        except zstandard.ZstdError:
            return False
        if len(planes) != len(target):
            return False
        numbers = np.frombuffer(target, dtype=np.uint8).reshape(-1, num_planes)
        np.copyto(numbers, np.frombuffer(planes, dtype=np.uint8).reshape(num_planes, -1).T)
        return True
