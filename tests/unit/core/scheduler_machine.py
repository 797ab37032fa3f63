"""Random histories for scheduler_rig.py, as a state machine of hypothesis'."""

from __future__ import annotations

import os
import random
import sys

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.kv.connector import TransferDirection, TransferOutcome, TransferResult
from tests.unit.core.scheduler_rig import SchedulerRig, with_options

CI_EXAMPLES = 120
EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or CI_EXAMPLES,
    stateful_step_count=60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MAX_MODEL_LEN = 40
FATES_OF_LOADS = ["ok", "ok", "wait", "short", "short", "fail"]
FATES_OF_SAVES = ["ok", "ok", "ok", "wait", "fail", "early", "release"]

tokens = st.integers(min_value=1, max_value=3)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, steps, transfers and faults in any order. only_steps, only_store: what begin() takes in place of what it drew."""

    rig: SchedulerRig
    only_steps = ""
    only_store = ""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(MAX_MODEL_LEN, 2 * MAX_MODEL_LEN),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.sampled_from([0, 4, 40]),
        limits=st.sampled_from([(0, 0, True), (0, 0, True), (3, 0, True), (7, 0, True), (7, 1, True), (0, 0, False)]),
        policy=st.sampled_from([("fcfs", 0.0), ("priority", 0.0), ("priority", 0.1)]),
        delay_factor=st.sampled_from([0.0, 0.0, 0.0, 2.5]),
        caches=st.sampled_from([True, True, True, False]),
        store=st.sampled_from(["none", "auto", "always", "always"]),
        timeout_s=st.sampled_from([0.05, 10.0]),
        steps=st.sampled_from(["one", "overlap", "overlap", "drafts"]),
    )
    def begin(
        self,
        block_size: int,
        pool_tokens: int,
        max_num_seqs: int,
        extra_budget: int,
        limits: tuple[int, int, bool],
        policy: tuple[str, float],
        delay_factor: float,
        caches: bool,
        store: str,
        timeout_s: float,
        steps: str,
    ) -> None:
        steps, store = self.only_steps or steps, self.only_store or store
        options = with_options(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            long_prefill_token_threshold=limits[0],
            max_long_partial_prefills=limits[1],
            enable_chunked_prefill=limits[2],
            policy=policy[0],
            priority_aging_s=policy[1],
            scheduler_delay_factor=delay_factor,
            enable_prefix_caching=caches,
            kv_load_policy="auto" if store == "none" else store,
            kv_load_timeout_s=timeout_s,
            kv_save_timeout_s=timeout_s,
            lookup_timeout_s=0.1,
            overlap_steps="on" if steps == "overlap" else "off",
        )
        num_blocks = -(-pool_tokens // block_size)
        has_store = store != "none"
        self.rig = SchedulerRig(options, num_blocks, MAX_MODEL_LEN, has_store=has_store, num_drafts=3 * (steps == "drafts"))

    @rule(
        family=st.integers(1, 2),
        num_shared=st.integers(0, 24),
        tail=st.lists(tokens, max_size=8),
        num_known=st.sampled_from([0, 0, 1, 3]),
        num_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 2),
        stop_at=st.sampled_from([-1, -1, 0, 2, 5]),
        is_prefill=st.sampled_from([False, False, True]),
        num_copies=st.sampled_from([1, 1, 2]),
    )
    def add(
        self,
        family: int,
        num_shared: int,
        tail: list[int],
        num_known: int,
        num_tokens: int,
        salt: str,
        priority: int,
        stop_at: int,
        is_prefill: bool,
        num_copies: int,
    ) -> None:
        prompt = (*range(100 * family, 100 * family + num_shared), *tail) or (5,)
        for _ in range(num_copies):
            self.rig.add(prompt, num_known, num_tokens, salt, priority, stop_at, is_prefill=is_prefill)

    @precondition(lambda self: self.rig.expected)
    @rule(which=st.integers(0, 10))
    def abort(self, which: int) -> None:
        names = list(self.rig.expected)
        self.rig.abort(names[which % len(names)])

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rig.may_schedule:
                self.rig.schedule()
                self.rig.check_blocks()
            if self.rig.steps:
                self.rig.finish()
                self.rig.check_blocks()

    @rule(seed=st.integers(0, 10**6), num_steps=st.integers(5, 25))
    def rough_time(self, seed: int, num_steps: int) -> None:
        """Many steps, with requests that come and go, and something that goes wrong at each."""
        rng, rig = random.Random(seed), self.rig
        for _ in range(num_steps):
            if rng.random() < 0.4:
                start = 100 * rng.randint(1, 2)
                prompt = (*range(start, start + rng.randint(0, 24)), *rng.choices([1, 2, 3], k=rng.randint(1, 8)))
                stop_at, salt, known = rng.randint(-9, 9), rng.choice(["", "", "tenant"]), rng.choice([0, 0, 2])
                rig.add(prompt, known, rng.randint(1, 20), salt, rng.randint(-1, 2), stop_at, is_prefill=rng.random() < 0.2)
            if rig.expected and rng.random() < 0.05:
                rig.abort(rng.choice(list(rig.expected)))
            if rng.random() < 0.1:
                rig.clock.advance(0.1)
            self._end_transfers(TransferDirection.LOAD, rng.choices(FATES_OF_LOADS, k=3))
            self._end_transfers(TransferDirection.SAVE, rng.choices(FATES_OF_SAVES, k=3))
            if rig.may_schedule:
                rig.schedule()
                rig.check_blocks()
            if rig.steps and rng.random() < 0.7:
                rig.finish(fails=rng.random() < 0.02)
                rig.check_blocks()

    @precondition(lambda self: self.rig.may_schedule)
    @rule()
    def schedule_ahead(self) -> None:
        self.rig.schedule()

    @precondition(lambda self: self.rig.steps)
    @rule()
    def finish_one(self) -> None:
        self.rig.finish()

    @precondition(lambda self: self.rig.steps)
    @rule()
    def fail_step(self) -> None:
        self.rig.finish(fails=True)

    @rule(fates=st.lists(st.sampled_from(FATES_OF_LOADS), min_size=1, max_size=3))
    def end_loads(self, fates: list[str]) -> None:
        self._end_transfers(TransferDirection.LOAD, fates)

    @rule(fates=st.lists(st.sampled_from(FATES_OF_SAVES), min_size=1, max_size=6))
    def end_saves(self, fates: list[str]) -> None:
        self._end_transfers(TransferDirection.SAVE, fates)

    def _end_transfers(self, direction: TransferDirection, fates: list[str]) -> None:
        connector = self.rig.connector
        transfers = [transfer for transfer in connector.pending.values() if transfer.direction is direction]
        for fate, transfer in zip(fates, transfers, strict=False):
            transfer_id, num_blocks = transfer.transfer_id, len(transfer.block_ids)
            if fate == "ok":
                connector.complete(transfer_id, wants_save=transfer_id % 3 == 0)
            elif fate == "short":
                connector.complete(transfer_id, TransferOutcome.CORRUPT, num_blocks // 2)
            elif fate == "fail":
                connector.complete(transfer_id, TransferOutcome.ERROR, 0)
                connector.report(TransferResult(transfer_id, num_blocks, TransferOutcome.OK))  # a second time, and not true
            elif fate == "early":
                connector.report_early(TransferResult(transfer_id, num_blocks, TransferOutcome.OK))
            elif fate == "release":
                connector.release(transfer_id)

    @rule(is_known=st.sampled_from([True, True, False]), fails=st.sampled_from(["", "", "", "lookup", "load", "save", "poll"]))
    def change_store(self, is_known: bool, fails: str) -> None:
        self.rig.connector.is_lookup_known = is_known
        self.rig.connector.fail_calls = {fails} - {""}

    @precondition(lambda self: self.rig.connector.store.blocks)
    @rule(which=st.integers(0, 100))
    def evict_from_store(self, which: int) -> None:
        stored = self.rig.connector.store.blocks
        del stored[list(stored)[which % len(stored)]]

    @rule(family=st.integers(1, 2), salt=st.sampled_from(["", "tenant"]))
    def store_elsewhere(self, family: int, salt: str) -> None:
        self.rig.store(tuple(range(100 * family, 100 * family + 24)), salt)

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule(force=st.booleans())
    def reset_prefix_cache(self, force: bool) -> None:
        self.rig.reset(force=force)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_blocks()

    def teardown(self) -> None:
        if hasattr(self, "rig") and sys.exc_info()[0] is None:  # else it would hide what went wrong
            self.rig.drain()
