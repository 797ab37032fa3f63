"""An engine with the fake model, and a loop that drives it to the end: what most unit tests of the engine need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from core.config import EngineOptions
from core.drafter import Drafter
from core.engine import EngineCore
from core.grammar import GrammarCompiler
from core.kv.connector import KVConnector
from core.kv.pool_memory import KVPoolMemory
from core.request import FinishReason, RequestStage
from core.sampling_params import SamplingParams
from core.step import StepPlan
from core.step_output import FinishedRequest, StepOutput
from tests.support.fake_runner import FakeRunner, fake_layout, fake_model
from tests.support.memory_connector import MemoryConnector, MemoryStore
from tests.support.virtual_clock import VirtualClock


class EngineBench:
    """One engine of the fake model. tokens / finished / prefill_done collect all outputs by request_id."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        connector: KVConnector | None = None,
        max_model_len: int = 0,
        drafter: Drafter | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        **options: Any,
    ) -> None:
        self.options = dataclasses.replace(
            EngineOptions(block_size=4, max_num_seqs=16, max_num_batched_tokens=256, speculative_disable_by_batch_size=16),
            **options,
        )
        block_size = self.options.block_size
        self.clock = VirtualClock()
        self.pool = KVPoolMemory(fake_layout(block_size), num_blocks)
        self.runner = FakeRunner(self.pool)
        self.connector = connector
        if connector is not None:
            connector.register_kv_cache(self.pool)
        model = fake_model(block_size, max_model_len or num_blocks * block_size)
        self.engine = EngineCore(
            self.options,
            model,
            num_blocks,
            self.runner,
            connector,
            self.clock,
            drafter=drafter,
            grammar_compiler=grammar_compiler,
            adapters=self.runner.adapters,
        )
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.prefill_done: list[str] = []
        self.num_cached_tokens: dict[str, int] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        output: Sequence[int] = (),
        salt: str = "",
        **keywords: Any,
    ) -> None:
        """Queue a greedy request; keywords that SamplingParams knows go there, the rest to add_request."""
        names = {leaf.name for leaf in dataclasses.fields(SamplingParams)}
        sampling = {name: keywords.pop(name) for name in list(keywords) if name in names}
        self.engine.add_request(
            request_id,
            prompt,
            output,
            SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling),
            cache_salt=salt,
            **keywords,
        )
        self.tokens[request_id] = []

    def step(self) -> StepOutput:
        """One engine step; collects its news."""
        output = self.engine.step()
        for request_id, token_ids in output.new_token_ids.items():
            self.tokens[request_id] += token_ids
        self.finished.update(output.finished)
        self.prefill_done += output.prefill_done
        self.num_cached_tokens.update(output.num_cached_tokens)
        self.clock.advance(0.01)
        return output

    @property
    def last_plan(self) -> StepPlan:
        """What the runner was last asked."""
        return self.runner.plans[-1]

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is nothing left to do; asserts that it ends."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.audit()}")

    def assert_nothing_leaked(self) -> None:
        """Every block is free, every transfer is over, the runner has forgotten everybody."""
        self.engine.step()  # tells the runner who ended last
        while self.engine.has_work():
            self.engine.step()
        audit = self.engine.audit()
        assert audit.problems == ()
        assert all(count == 0 for count in audit.counts.values()), audit.counts
        assert self.runner.num_requests == 0


PREFILL = RequestStage.PREFILL
LENGTH = FinishReason.LENGTH
STOP = FinishReason.STOP


def unique_prompt(name: int, num_tokens: int) -> list[int]:
    """num_tokens tokens that no other name's prompt starts with."""
    return [name, *range(1, num_tokens)][:num_tokens]


def scheduled(bench: EngineBench) -> dict[str, int]:
    """The last plan's tokens per request."""
    return dict(bench.last_plan.num_scheduled_tokens)


def store_with(*prompts: list[int], block_size: int = 16) -> MemoryStore:
    """A store that holds all full blocks of these prompts."""
    store = MemoryStore()
    bench = EngineBench(num_blocks=64, block_size=block_size, connector=MemoryConnector(store))
    for index, prompt in enumerate(prompts):
        bench.add(f"seed {index}", prompt, max_tokens=1, stage=PREFILL)
    bench.run()
    assert len(bench.prefill_done) == len(prompts)
    return store
