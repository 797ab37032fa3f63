"""Reading request traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.router.trace import parse_trace, read_trace
from tests.unit.bench.router.traces import line


def test_read_trace_file_gives_requests_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(0, [0, 1], 10, 7) + "\n" + line(3000, [0, 1, 2]) + "\n" + line(3000, [5]) + "\n")
    first, second, third = read_trace(path)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_s) == (522, 7, 0.0)
    assert (second.arrival_s, third.arrival_s, third.index) == (3.0, 3.0, 2)
    assert second.block_names[:2] == first.block_names and len(set(second.block_names)) == 3
    assert len(read_trace(path, 2)) == 2


def test_trace_request_partial_block_is_no_full_one() -> None:
    partial, full = parse_trace([line(0, [0, 1], 10), line(0, [0, 1])])
    assert partial.full_block_names == partial.block_names[:1]
    assert full.full_block_names == full.block_names


def test_trace_request_output_fills_blocks_of_its_own() -> None:
    first, second = parse_trace([line(0, [0, 1], 500, 600), line(0, [0, 1], 500, 11)])
    assert len(first.output_block_names()) == 2  # 500 + 600 tokens behind the first block
    assert second.output_block_names() == []
    assert not set(first.output_block_names()) & set(first.block_names)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "line 2"),
        ("nonsense", "line 2"),
        (line(0, [0, 1]).replace("1024", "512"), "hash_ids"),
        (line(0, [-1]), "hash_ids"),
        (line(0, [0], output_length=0), "output_length"),
        (line(-5, [0]), "timestamp"),
    ],
)
def test_parse_trace_what_is_no_request_is_refused_by_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_trace([line(0, [0]), text])
