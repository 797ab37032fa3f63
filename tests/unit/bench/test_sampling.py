"""bench.sampling end to end, in small: every kind is measured, and both ways choose the same tokens."""

from __future__ import annotations

import json

import pytest
import torch

from bench.sampling import KINDS, main, make_logits, make_rows
from core.model.sampler import Sampler
from tests.support.plain_sampler import sample_plainly


def test_bench_sampling_prints_every_kind_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "9", "--vocab", "512", "--history", "20", "--rounds", "1", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["kinds"]) == [*KINDS, "mixed"]
    assert all(kind["ms"] > 0 and kind["plain_ms"] > 0 and kind["ratio"] > 0 for kind in result["kinds"].values())


@pytest.mark.parametrize("is_flat", [False, True])
def test_bench_sampling_compares_ways_that_choose_the_same(is_flat: bool) -> None:
    logits = make_logits(16, 4096, torch.bfloat16, is_flat=is_flat)
    rows = make_rows("mixed", 16, 4096, 60)
    assert Sampler([0]).sample(logits, rows) == sample_plainly(logits, rows, [0])
