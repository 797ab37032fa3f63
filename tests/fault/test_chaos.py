"""Chaos in small: under load, one node of each role is killed and one is stalled; every accepted request ends right."""

from __future__ import annotations

import pytest

from tests.fault.chaos import Chaos, ChaosOptions, is_all_right


@pytest.mark.timeout(300)
def test_chaos_a_node_of_each_role_killed_under_load_every_accepted_request_is_right_and_nothing_leaks() -> None:
    options = ChaosOptions(
        duration_s=22.0, kill_every_s=7.0, num_clients=6, num_questions=16, seed=3, victim_roles=("decode", "prefill", "decode")
    )
    report = Chaos(options).run()
    assert is_all_right(report), report
    assert report["accepted"] == report["right"] >= 10
    assert report["kills"] == 3 and report["undetected"] == 0
    assert report["moved_requests"] > 0
    assert report["moved_tokens_from_store_share"] > 0.5
