"""The bench of routing decisions runs, small. Its figures are nobody's business here."""

from __future__ import annotations

import json
import random
import sys

import pytest

from bench.router import __main__
from bench.router.cost_model import CostModel
from bench.router.decide import fill_index, make_prompt
from bench.router.virtual_node import VirtualNode
from bench.router.virtual_router import VirtualRouter


def test_main_decide_prints_one_json_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench.router", "decide", "--nodes", "3", "--blocks", "5000", "--decisions", "50", "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--policy", "least_loaded"])
    __main__.main()
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert 0 < found["decision_us"]["p50"] <= found["decision_us"]["p99"]
    assert found["blocks"] == 5000


def test_make_prompt_begins_as_something_in_the_index() -> None:
    rng = random.Random(3)
    nodes = [VirtualNode(f"n{place}", "decode", 1, 8, CostModel()) for place in range(4)]
    sequences, num_known = fill_index(VirtualRouter("round_robin", nodes), nodes, 3000, rng)
    assert num_known == 3000
    prompts = [make_prompt(sequences, 100, rng) for _ in range(50)]
    assert all(len(prompt) == 100 for prompt in prompts)
    firsts = {sequence[0] for sequence in sequences}
    assert sum(prompt[0] in firsts for prompt in prompts) > 25
