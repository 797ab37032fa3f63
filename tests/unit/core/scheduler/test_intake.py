"""What a request must be to be queued, and requests that have begun elsewhere."""

from __future__ import annotations

import pytest

from core.errors import InvalidInputError, OverloadedError
from tests.support.engine_bench import EngineBench, unique_prompt
from tests.support.fake_runner import oracle_tokens


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 80}, "prompt"),
        ({"prompt": [1], "output": [1, 2], "max_tokens": 2}, "max_tokens"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
    ],
)
def test_add_request_bad_input_names_the_field(keywords: dict[str, object], field: str) -> None:
    bench = EngineBench(num_blocks=20, block_size=4)
    with pytest.raises(InvalidInputError) as caught:
        bench.add("r", **keywords)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert bench.engine.has_work() is False


def test_add_request_queue_full_declines() -> None:
    bench = EngineBench(num_blocks=20, block_size=4, max_num_waiting=2)
    bench.add("a", [1, 2])
    bench.add("b", [1, 2])
    with pytest.raises(OverloadedError):
        bench.add("c", [1, 2])


def test_request_moved_mid_stream_continues_exactly() -> None:
    prompt = unique_prompt(1, 10)
    whole = oracle_tokens(prompt, 12)
    bench = EngineBench(num_blocks=20, block_size=4)
    bench.add("r", prompt, max_tokens=12, output=whole[:5])
    outputs = [bench.step() for _ in range(7)]
    assert bench.tokens["r"] == whole[5:]
    assert [output.first_index["r"] for output in outputs] == [5, 6, 7, 8, 9, 10, 11]
