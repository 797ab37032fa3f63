"""The scheduler's benches run, small, and print one JSON line. Their figures are nobody's business here."""

from __future__ import annotations

import json
import sys

import pytest

from bench import scheduler, scheduler_scenarios, scheduling_policies
from bench.lines_of_code import count_lines


def test_scenarios_small_ones_do_what_they_are_called() -> None:
    assert scheduler_scenarios.admission(num_rounds=2, batch=2, prompt_tokens=64)["admit_request_us_p50"] > 0
    assert scheduler_scenarios.cached_prompts(num_rounds=1, batch=2, prompt_tokens=64)["add_and_schedule_ms_p50"] > 0
    assert scheduler_scenarios.churn(num_blocks=1280)["per_block_us"] > 0
    memory = scheduler_scenarios.waiting_memory(num_requests=100, prompt_tokens=64)
    assert memory["bytes_per_waiting_request"] > memory["of_which_token_ids"] > 8 * 64
    assert scheduler_scenarios.drafts(num_running=2, prompt_tokens=100, num_steps=3)["us_per_token"] > 0


def test_main_prints_one_json_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.scheduler", "--running", "4", "--prompt-tokens", "20", "--steps", "5", "--json"])
    scheduler.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["running"] == 4


def test_policies_letting_short_prompts_pass_shortens_their_wait() -> None:
    plain, passing = (
        scheduling_policies.simulate(8.0, 60, **options)
        for options in ({}, {"long_prefill_token_threshold": 768, "max_long_partial_prefills": 1})
    )
    assert passing["short_first_token_ms_p95"] < plain["short_first_token_ms_p95"] / 2


def test_count_lines_leaves_out_blanks_comments_and_docstrings() -> None:
    text = '"""A module."""\n\nX = 1  # one\n# nothing\ndef f() -> str:\n    """Says."""\n    return """a\nb"""\n'
    assert count_lines(text) == (8, 4)
