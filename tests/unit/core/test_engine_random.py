"""Random requests, pool sizes, aborts, store behaviour: every output must equal the oracle's and nothing may leak."""

from __future__ import annotations

import random

import pytest

from core.kv.connector import TransferDirection, TransferOutcome, TransferResult
from tests.support.engine_bench import PREFILL, EngineBench
from tests.support.fake_runner import oracle_tokens
from tests.support.guessing_drafter import OracleDrafter
from tests.support.memory_connector import MemoryConnector, MemoryStore


def _random_prompt(rng: random.Random, max_tokens: int) -> list[int]:
    prefix = [3] * rng.choice([0, 4, 8, 17])  # so that prompts share blocks
    return (prefix + [rng.randrange(1, 1000) for _ in range(rng.randrange(1, max_tokens))])[:max_tokens]


def _disturb(rng: random.Random, connector: MemoryConnector) -> None:
    """Complete, fail, delay or duplicate some of what is in flight, and damage the store."""
    for transfer_id in list(connector.pending):
        roll = rng.random()
        transfer = connector.pending[transfer_id]
        if transfer.direction is TransferDirection.SAVE and rng.random() < 0.3:
            connector.release(transfer_id)
        if roll < 0.3:
            continue
        if transfer.direction is TransferDirection.SAVE and rng.random() < 0.2:
            connector.report_early(TransferResult(transfer_id, len(transfer.block_ids), TransferOutcome.OK))
        if roll < 0.8:
            connector.complete(transfer_id, wants_save=rng.random() < 0.3)
        elif roll < 0.9:
            connector.complete(transfer_id, TransferOutcome.CORRUPT, rng.randrange(len(transfer.block_ids) + 1))
        else:
            connector.complete(transfer_id, TransferOutcome.ERROR, 0)
        if rng.random() < 0.2:
            connector.report(TransferResult(transfer_id, 99, TransferOutcome.OK))  # a duplicate
    if rng.random() < 0.05:
        connector.report(TransferResult(10_000_000, 1, TransferOutcome.OK))  # an unknown one
    if connector.store.blocks and rng.random() < 0.2:
        del connector.store.blocks[rng.choice(list(connector.store.blocks))]
    connector.is_lookup_known = rng.random() < 0.8
    connector.fail_calls = {rng.choice(["lookup", "load", "save", "poll"])} if rng.random() < 0.05 else set()


def _run_workload(seed: int) -> EngineBench:
    rng = random.Random(seed)
    store = MemoryStore()
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randrange(64 // block_size, 256 // block_size)
    guesser = OracleDrafter(rng.randrange(1, 5), rng) if rng.random() < 0.3 else None
    bench = EngineBench(
        drafter=guesser,
        overlap_steps=rng.choice(["on", "off"]),
        num_blocks=num_blocks,
        connector=MemoryConnector(store, is_immediate=rng.random() < 0.3) if rng.random() < 0.8 else None,
        max_model_len=64,
        block_size=block_size,
        max_num_seqs=rng.randrange(1, 9),
        max_num_batched_tokens=rng.choice([9, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        enable_chunked_prefill=rng.random() < 0.8,
        enable_prefix_caching=rng.random() < 0.9,
        policy=rng.choice(["fcfs", "priority"]),
        kv_load_timeout_s=rng.choice([0.02, 10.0]),
        kv_save_timeout_s=rng.choice([0.02, 10.0]),
        lookup_timeout_s=0.05,
    )
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    num_left = rng.randrange(5, 25)
    for step in range(3000):
        if num_left and rng.random() < 0.4:
            request_id = f"r{num_left}"
            num_left -= 1
            prompt = _random_prompt(rng, 40)
            is_prefill = rng.random() < 0.3
            known = oracle_tokens(prompt, rng.choice([0, 0, 3]))
            max_tokens = len(known) + rng.randrange(1, 20)
            right = oracle_tokens(prompt, len(known) + (1 if is_prefill else max_tokens - len(known)))[len(known) :]
            if rng.random() < 0.4:  # an end that nobody can know before it is sampled
                stop = rng.choice(right)
                right = right[: right.index(stop) + 1]
            else:
                stop = None
            expected[request_id] = right
            bench.add(
                request_id,
                prompt,
                max_tokens,
                output=known,
                stop_token_ids=() if stop is None else (stop,),
                salt=rng.choice(["", "", "salt"]),
                priority=rng.randrange(3),
                **({"stage": PREFILL} if is_prefill else {}),
            )
            if guesser is not None:
                guesser.prompts[request_id] = prompt
        if expected and rng.random() < 0.05:
            request_id = rng.choice(list(expected))
            if bench.engine.abort_request(request_id):
                aborted.add(request_id)
        bench.step()
        audit = bench.engine.audit()
        holders = ("request_references", "transfer_pins", "fenced_references")
        references = sum(audit.counts[holder] for holder in holders)
        assert audit.counts["block_references"] == references, f"seed {seed}, step {step}"
        assert all(plan.num_total_tokens <= bench.options.max_num_batched_tokens for plan in bench.runner.plans[-1:])
        if bench.connector is not None:
            _disturb(rng, bench.connector)
        if not num_left and not bench.engine.has_work():
            break
        if step > 400 and bench.connector is not None:  # the faults stop, everything must drain
            bench.connector.fail_calls = set()
            bench.connector.is_lookup_known = True
            for transfer_id in list(bench.connector.pending):
                bench.connector.complete(transfer_id)
    for request_id, token_ids in expected.items():
        if request_id not in aborted:
            assert bench.tokens[request_id] == token_ids, f"seed {seed}: {request_id}"
    assert bench.engine.has_work() is False, f"seed {seed}: {bench.engine.audit()}"
    bench.assert_nothing_leaked()
    return bench


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_engine_random_workload_matches_oracle_and_leaks_nothing(first_seed: int) -> None:
    """What is printed on failure is the seed that replays it."""
    benches = [_run_workload(seed) for seed in range(first_seed, first_seed + 100)]
    assert sum(bench.engine.stats.num_preemptions for bench in benches) > 10, "the pools are too large to test preemption"
    assert sum(bench.engine.stats.num_draft_tokens for bench in benches) > 100, "nothing was ever drafted"
    accepted = sum(sum(bench.engine.stats.accepted_by_position.values()) for bench in benches)
    assert 50 < accepted < sum(bench.engine.stats.num_draft_tokens for bench in benches), "drafts never were right and wrong"
    assert sum(bench.engine.stats.external_hit_tokens for bench in benches) > 100, "nothing was ever loaded"
