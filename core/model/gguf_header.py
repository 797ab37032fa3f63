"""Walks a GGUF file's header before the library reads it: a damaged length would keep that busy for ever, or take all memory."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from core.errors import ModelLoadError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SIZE_BY_TYPE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 2  # arrays in arrays
_FEWEST_BYTES = 12  # of a key with its value, or of a tensor's description


def check_gguf_header(path: Path) -> None:
    """Raises ModelLoadError for a file whose header does not fit into it, OSError for one that cannot be read.

    Takes time in proportion to the header, whatever it says.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise ModelLoadError(f"{path}: not a readable GGUF file (it is empty)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                _Walk(content).header()
            except (ValueError, struct.error) as error:
                raise ModelLoadError(f"{path}: not a readable GGUF file ({error})") from error


class _Walk:
    """A place in the file. Raises ValueError where something would reach beyond the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 0

    def header(self) -> None:
        if self._content[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._skip(4)
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; allowed: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_fields = self._count(_FEWEST_BYTES), self._count(_FEWEST_BYTES)
        for _ in range(num_fields):
            self._text()
            self._value(self._number("<I"), depth=0)
        for _ in range(num_tensors):
            self._text()
            if (num_dimensions := self._number("<I")) > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor of {num_dimensions} dimensions; allowed: up to {_MAX_DIMENSIONS}")
            self._skip(8 * num_dimensions + 4 + 8)

    def _value(self, value_type: int, depth: int) -> None:
        if value_type in _SIZE_BY_TYPE:
            self._skip(_SIZE_BY_TYPE[value_type])
        elif value_type == _STRING:
            self._text()
        elif value_type == _ARRAY and depth < _MAX_DEPTH:
            of_type = self._number("<I")
            num_bytes = _SIZE_BY_TYPE.get(of_type)
            count = self._count(num_bytes or 8)
            if num_bytes is not None:
                self._skip(count * num_bytes)
                return
            for _ in range(count):
                self._value(of_type, depth + 1)
        else:
            raise ValueError(f"a value of type {value_type}")

    def _text(self) -> None:
        self._skip(self._count(1))

    def _count(self, bytes_of_each: int) -> int:
        count = self._number("<Q")
        if count * bytes_of_each > len(self._content) - self._place:
            raise ValueError(f"it says that {count} of something follow, and ends before that")
        return count

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._content, self._place)
        self._skip(struct.calcsize(form))
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._place += num_bytes
        if self._place > len(self._content):
            raise ValueError("it ends in its header")
