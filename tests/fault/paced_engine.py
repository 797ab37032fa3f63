"""An engine of the fake model that takes its time, on the real clock, over a real connector: what a fault of the store costs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import EngineOptions
from core.engine import EngineCore
from core.kv.pool_memory import KVPoolMemory
from core.request import RequestStage
from core.sampling_params import SamplingParams
from core.step import StepPlan, StepResult
from tests.support.fake_runner import VOCAB_SIZE, FakeRunner, fake_layout, fake_model, oracle_tokens

BLOCK_SIZE = 16
NUM_BLOCKS = 512
_HANG_S = 120.0  # a request that takes this long never ends
_POLL_S = 0.002


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """A prompt that shares no block with others."""
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=num_tokens)


class _PacedRunner(FakeRunner):
    """token_s: what computing a token takes."""

    def __init__(self, pool: KVPoolMemory, token_s: float) -> None:
        super().__init__(pool)
        self._token_s = token_s

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(plan.num_total_tokens * self._token_s)
        return super().execute(plan)


@dataclass(frozen=True, slots=True)
class Answer:
    """duration_s: until the last token, or until the prompt is handed over."""

    duration_s: float
    num_cached_tokens: int


class PacedEngine:
    """One request at a time. Knows the right answer to each. close() ends it, and must be called."""

    def __init__(self, connector: str, options: Mapping[str, Any], token_s: float = 0.0) -> None:
        clock, layout = MonotonicClock(), fake_layout(BLOCK_SIZE)
        pool = KVPoolMemory(layout, NUM_BLOCKS)
        self.connector = create_connector(connector, options, clock)
        self.connector.register_kv_cache(pool)
        engine_options = EngineOptions(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        model = fake_model(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
        self.engine = EngineCore(engine_options, model, NUM_BLOCKS, _PacedRunner(pool, token_s), self.connector, clock)
        self._numbers = itertools.count()

    def answer(self, prompt: Sequence[int], stage: RequestStage = RequestStage.DECODE) -> Answer:
        """Serve a request to its end; fails where a token is wrong or it never ends."""
        request_id = f"request-{next(self._numbers)}"
        started_s = time.monotonic()
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        self.engine.add_request(request_id, prompt, [], sampling, stage=stage)
        tokens: list[int] = []
        num_cached_tokens = 0
        is_over = False
        while not is_over:
            assert time.monotonic() - started_s < _HANG_S, "the request hangs"
            output = self.engine.step()
            tokens += output.new_token_ids.get(request_id, [])
            num_cached_tokens = output.num_cached_tokens.get(request_id, num_cached_tokens)
            is_over = request_id in (output.prefill_done if stage is RequestStage.PREFILL else output.finished)
            if not output.num_tokens:
                time.sleep(_POLL_S)
        duration_s = time.monotonic() - started_s
        assert tokens == oracle_tokens(prompt, 1 if stage is RequestStage.PREFILL else 2)
        return Answer(duration_s, num_cached_tokens)

    def close(self) -> None:
        """Fails when anything is held afterwards."""
        self.engine.close()
        audit = self.engine.audit()
        assert audit.problems == () and not any(audit.counts.values()), audit
