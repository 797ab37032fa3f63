"""Which blocks another engine loads and stores: over a store in a dict, with a clock of the test's."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.vllm.external_prefixes import ExternalPrefixes, ScheduledRequest, StepMoves
from connectors.vllm.staged_transfers import Verdict
from core.kv.hashing import Namespace
from tests.support.memory_connector import MemoryConnector, MemoryStore
from tests.support.virtual_clock import VirtualClock

BLOCK = 4
TOKENS = list(range(100, 118))  # four blocks and a half
LOOKUP_TIMEOUT_S = 1.0


class Scheduler:
    """One scheduler's prefixes; `ranks` tensor-parallel ranks."""

    def __init__(self, ranks: int = 1, saves: bool = True, loads: bool = True, save_output_blocks: bool = True) -> None:
        self.clock = VirtualClock()
        self.connector = MemoryConnector(MemoryStore())
        self.namespaces = [Namespace(b"model", b"rank %d" % rank, BLOCK) for rank in range(ranks)]
        self.prefixes = ExternalPrefixes(
            self.connector,
            self.namespaces,
            self.clock,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            saves=saves,
            loads=loads,
            save_output_blocks=save_output_blocks,
        )

    def ask(self, request_id: str = "r", tokens: Sequence[int] = TOKENS, num_computed: int = 0, salt: str = "") -> int | None:
        return self.prefixes.num_external_tokens(request_id, tokens, num_computed, salt, b"")

    def step(self, num_computed: int, tokens: Sequence[int] = TOKENS, request_id: str = "r") -> StepMoves:
        table = range(50, 50 + -(-max(num_computed, 1) // BLOCK))
        return self.prefixes.plan_step([ScheduledRequest(request_id, tokens, num_computed, lambda: table)])

    def store(self, moves: StepMoves) -> None:
        """What the step saves is in the store now."""
        for rank_moves in moves.saves_by_rank:
            for move in rank_moves:
                self.connector.store.blocks.update(dict.fromkeys(move.block_hashes, b""))


def test_prefix_saved_by_one_request_is_a_hit_of_another_but_for_the_last_token() -> None:
    scheduler = Scheduler()
    assert scheduler.ask("first", TOKENS[:16]) == 0
    moves = scheduler.step(16, TOKENS[:16], "first")
    ((move,),) = moves.saves_by_rank
    assert move.block_ids == (50, 51, 52, 53) and move.ancestors == ()
    scheduler.store(moves)
    assert scheduler.ask("longer", TOKENS) == 16
    assert scheduler.ask("same", TOKENS[:16]) == 12  # something is left to sample from
    assert scheduler.ask("partly local", TOKENS, num_computed=8) == 8
    assert scheduler.ask("all local", TOKENS, num_computed=16) == 0
    assert scheduler.ask("salted", TOKENS, salt="other") == 0


def test_load_names_the_blocks_after_the_local_ones_and_their_ancestors_once() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    assert scheduler.ask(num_computed=4) == 12
    scheduler.prefixes.note_allocation("r", [7, 8, 9, 10], 12)
    moves = scheduler.step(18)
    ((load,),) = moves.loads_by_rank
    assert load.block_ids == (8, 9, 10) and len(load.ancestors) == 1
    assert moves.saves_by_rank == ((),)  # all of it is stored
    scheduler.prefixes.note_allocation("r", [7, 8, 9, 10, 11], 0)
    assert scheduler.step(19).loads_by_rank == ((),)


def test_saves_follow_what_is_computed_and_known() -> None:
    scheduler = Scheduler()
    scheduler.ask()
    assert [len(move.block_ids) for move in scheduler.step(6).saves_by_rank[0]] == [1]
    assert scheduler.step(7).saves_by_rank == ((),)
    assert [move.block_ids for move in scheduler.step(12).saves_by_rank[0]] == [(51, 52)]
    # 24 tokens are computed or in flight, 21 of them known.
    assert [move.block_ids for move in scheduler.step(24, [*TOKENS, 1, 2, 3]).saves_by_rank[0]] == [(53, 54)]
    assert [move.block_ids for move in scheduler.step(25, [*TOKENS, 1, 2, 3, 4, 5, 6]).saves_by_rank[0]] == [(55,)]


def test_output_blocks_are_left_out_when_they_are_not_wanted() -> None:
    scheduler = Scheduler(save_output_blocks=False)
    scheduler.ask()
    scheduler.step(18)
    assert scheduler.step(20, [*TOKENS, 1, 2]).saves_by_rank == ((),)


def test_hole_in_the_store_is_filled_by_whoever_has_the_blocks_locally() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    scheduler.connector.store.blocks.pop(next(iter(scheduler.connector.store.blocks)))
    assert scheduler.ask(num_computed=16) == 0
    assert [move.block_ids for move in scheduler.step(18).saves_by_rank[0]] == [(50, 51, 52, 53)]


def test_failed_load_is_not_repeated_and_its_blocks_are_saved_again() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    assert scheduler.ask() == 16
    scheduler.prefixes.note_allocation("r", [50, 51, 52, 53], 16)
    scheduler.step(0)
    scheduler.prefixes.note_failed_blocks({51, 52, 53})
    scheduler.prefixes.note_ended_load("r")
    assert scheduler.ask() == 0  # although the store still says that it has them
    assert [move.block_ids for move in scheduler.step(18).saves_by_rank[0]] == [(51, 52, 53)]
    assert scheduler.ask("another") == 16


def test_failed_blocks_after_a_load_ended_are_somebody_elses() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    scheduler.ask()
    scheduler.prefixes.note_allocation("r", [50, 51, 52, 53], 16)
    scheduler.prefixes.note_ended_load("r")
    scheduler.prefixes.note_failed_blocks({50})
    assert scheduler.ask() == 16


def test_unanswered_lookup_is_a_miss_after_its_timeout() -> None:
    scheduler = Scheduler()
    scheduler.connector.is_lookup_known = False
    assert scheduler.ask() is None
    scheduler.clock.advance(LOOKUP_TIMEOUT_S / 2)
    assert scheduler.ask() is None
    scheduler.clock.advance(LOOKUP_TIMEOUT_S)
    assert scheduler.ask() == 0


def test_store_that_keeps_failing_is_left_alone_and_tried_again() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    scheduler.prefixes.note_verdict(Verdict(num_faults=3))
    num_lookups = len(scheduler.connector.lookups)
    assert scheduler.ask() == 0 and len(scheduler.connector.lookups) == num_lookups
    assert scheduler.step(16).saves_by_rank == ((),)
    scheduler.clock.advance(5.0)
    assert [len(move.block_ids) for move in scheduler.step(16).saves_by_rank[0]] == [4]  # offered late, but offered
    scheduler.connector.fail_calls.add("lookup")
    assert scheduler.ask("unlucky") == 0


def test_ranks_have_names_of_their_own_and_the_least_of_them_counts() -> None:
    scheduler = Scheduler(ranks=2)
    scheduler.ask("first")
    moves = scheduler.step(16, request_id="first")
    (first,), (second,) = moves.saves_by_rank
    assert first.block_ids == second.block_ids and not set(first.block_hashes) & set(second.block_hashes)
    scheduler.store(moves)
    assert scheduler.ask() == 16
    del scheduler.connector.store.blocks[second.block_hashes[2]]
    assert scheduler.ask("another") == 8


def test_roles_that_only_load_or_only_save_do_no_more() -> None:
    producer, consumer = Scheduler(loads=False), Scheduler(saves=False)
    producer.ask("first")
    moves = producer.step(16, request_id="first")
    producer.store(moves)
    assert producer.ask() == 0
    consumer.connector.store = producer.connector.store
    assert consumer.ask() == 16
    assert consumer.ask("new", list(range(1000, 1010))) == 0
    assert consumer.step(8, list(range(1000, 1010)), "new").saves_by_rank == ((),)


def test_new_generation_finds_nothing_of_the_old_one() -> None:
    scheduler = Scheduler()
    scheduler.ask("first")
    scheduler.store(scheduler.step(16, request_id="first"))
    scheduler.prefixes.begin_generation(b"weights have changed")
    assert scheduler.ask() == 0
    scheduler.prefixes.forget("r")
    scheduler.prefixes.forget("r")
    assert scheduler.step(16).saves_by_rank == ((),)
