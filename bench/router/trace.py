"""Reads request traces in Mooncake's format: when requests came, how long they were, and which blocks their prompts share.

One JSON object a line: timestamp (ms), input_length and output_length (tokens), hash_ids: one per block of the prompt, the last
one of which may be partial. Equal ids mean equal content and an equal prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512
_OUTPUT_SPACE = 1 << 96  # ids of a trace are far below, so that outputs and prompts never share a name


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. block_names: 16 bytes for each block of the prompt, the partial one at its end included."""

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_names: tuple[bytes, ...]

    @property
    def full_block_names(self) -> tuple[bytes, ...]:
        """Names of the blocks that the prompt fills."""
        return self.block_names[: self.num_prompt_tokens // BLOCK_TOKENS]

    def output_block_names(self) -> list[bytes]:
        """Names of the blocks that the output fills: nobody else's, since the trace does not say what follows whose answer."""
        num_full = (self.num_prompt_tokens + self.num_output_tokens) // BLOCK_TOKENS
        num_own = num_full - self.num_prompt_tokens // BLOCK_TOKENS
        return [_name(_OUTPUT_SPACE + (self.index << 32) + place) for place in range(num_own)]


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """The requests in the file's order. Raises ValueError, with the line, for what is no request."""
    with path.open(encoding="utf-8") as lines:
        return parse_trace(lines, max_requests)


def parse_trace(lines: Iterable[str], max_requests: int | None = None) -> list[TraceRequest]:
    """The requests of the first max_requests lines (None: all). Arrival times must not decrease; ties keep their order."""
    requests: list[TraceRequest] = []
    for number, text in enumerate(lines, 1):
        if max_requests is not None and len(requests) >= max_requests:
            break
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from error
        if line.input_length < 1 or line.output_length < 1:
            raise ValueError(f"line {number}: input_length and output_length: allowed: 1 or more")
        if len(line.hash_ids) != -(-line.input_length // BLOCK_TOKENS) or min(line.hash_ids) < 0:
            raise ValueError(f"line {number}: hash_ids: allowed: one number from 0 on per {BLOCK_TOKENS} tokens of input_length")
        arrival_s = line.timestamp / 1000
        if requests and arrival_s < requests[-1].arrival_s:
            raise ValueError(f"line {number}: timestamp: got {line.timestamp:g}; allowed: no less than the line's before")
        names = tuple(map(_name, line.hash_ids))
        requests.append(TraceRequest(len(requests), arrival_s, line.input_length, line.output_length, names))
    return requests


def _name(number: int) -> bytes:
    return number.to_bytes(16, "big")
