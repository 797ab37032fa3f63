"""What is saved when, and when a prefill-stage request is reported as handed over."""

from __future__ import annotations

import pytest

from core.kv.connector import TransferDirection
from core.request import FinishReason
from tests.support.engine_bench import PREFILL, EngineBench, unique_prompt
from tests.support.fake_runner import oracle_tokens
from tests.support.memory_connector import MemoryConnector


def test_prefill_stage_samples_one_token_and_reports_done_after_saves() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, max_num_batched_tokens=32)
    prompt = unique_prompt(1, 40)
    bench.add("r", prompt, max_tokens=50, stage=PREFILL)
    bench.step()
    assert [transfer.direction for transfer in connector.started] == [TransferDirection.SAVE], "saved while computing"
    bench.step()
    assert bench.finished["r"].reason is FinishReason.LENGTH
    assert bench.tokens["r"] == oracle_tokens(prompt, 1)
    bench.step()
    assert bench.prefill_done == []
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.step()
    assert bench.prefill_done == ["r"]
    bench.assert_nothing_leaked()


def test_prefill_stage_handoff_is_reported_between_steps_and_waited_for_briefly() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
    assert bench.engine.handoff_wait_s() == 0.0
    bench.step()
    assert bench.engine.handoff_wait_s() > 0.0, "its save takes milliseconds, the next step may take seconds"
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    assert bench.engine.settle().prefill_done == ["r"]
    bench.engine.record_gauges()
    assert bench.engine.stats.kv_usage_ratio == 0.0, "metrics know it although no step follows"
    assert bench.engine.handoff_wait_s() == 0.0


def test_prefill_stage_slow_store_does_not_hold_up_the_engine() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
    bench.step()
    bench.clock.advance(1.0)
    assert bench.engine.handoff_wait_s() == 0.0, "it had its time"
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    assert bench.prefill_done == ["r"]


def test_prefill_stage_store_that_hangs_is_waited_for_as_long_as_computing_takes() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.engine._ledger.cost.observe_prefill(40, 0.0, 2.0)
    bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
    bench.step()
    bench.clock.advance(0.8)
    bench.step()
    assert bench.prefill_done == []
    bench.clock.advance(0.2)
    bench.step()
    assert bench.prefill_done == ["r"], "the decode node computes it sooner than this store stores it"
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    bench.assert_nothing_leaked()


def test_prefill_stage_local_hit_is_saved_again_for_the_handoff() -> None:
    connector = MemoryConnector()
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    prompt = unique_prompt(1, 40)
    bench.add("a", prompt, max_tokens=5, stage=PREFILL)
    bench.run()
    connector.store.blocks.clear()  # the store evicted it
    bench.add("b", prompt, max_tokens=5, stage=PREFILL)
    bench.run()
    assert len(connector.store.blocks) == 2
    assert bench.prefill_done == ["a", "b"]


def test_decode_blocks_are_saved_only_if_wanted() -> None:
    counts = []
    for is_wanted in (True, False):
        connector = MemoryConnector()
        bench = EngineBench(num_blocks=20, block_size=4, connector=connector, save_decode_blocks=is_wanted)
        bench.add("r", unique_prompt(1, 10), max_tokens=10)
        bench.run()
        counts.append(len(connector.store.blocks))
    assert counts == [4, 2]


@pytest.mark.parametrize("num_tokens", [8, 40])
def test_prefill_stage_saves_full_blocks_by_hash_and_pins_them_until_the_store_has_them(num_tokens: int) -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", unique_prompt(1, num_tokens), max_tokens=50, stage=PREFILL)
    bench.step()
    assert bench.finished["r"].reason is FinishReason.LENGTH
    saved = [block_id for transfer in connector.started for block_id in transfer.block_ids]
    assert len(saved) == num_tokens // 16, "half a block has no name that another node could ask for"
    assert bench.engine._pool.num_free == 20 - len(saved)
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.step()
    assert (bench.prefill_done, bench.engine._pool.num_free) == (["r"], 20)
    bench.assert_nothing_leaked()


def test_abort_while_saving_frees_blocks_when_the_store_has_read_them() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", unique_prompt(1, 40), max_tokens=50)
    bench.step()
    assert bench.engine.abort_request("r") is True
    assert bench.engine._pool.num_free == 18, "two blocks are being read; the third is free"
    bench.step()
    assert bench.engine._pool.num_free == 18
    connector.complete(connector.started[0].transfer_id)
    bench.step()
    assert bench.engine._pool.num_free == 20
    bench.assert_nothing_leaked()
