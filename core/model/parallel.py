"""One model on several ranks: the runner of rank 0, which is the node's, and the loop of the others, which follow it.

Every rank runs the same plans over its share of weights and heads. Rank 0 alone samples, and tells the others. What a step wrote
is there on all ranks when rank 0 returns its result: so a connector may move the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from core.errors import RankLostError
from core.model.architecture import ModelArchitecture
from core.model.device_pool import TorchCopies
from core.model.exchange import Exchange, GatheredLinear, ReducedLinear
from core.model.linear import Linear, MakeLinear
from core.model.load_decoder import DecoderPart
from core.model.runner import ModelPart, TorchModelRunner
from core.model.sampled_row import SampledRow
from core.model.sampler import Sampler
from core.model.shards import Shard, slice_projection
from core.ranks.channel import Channel
from core.ranks.messages import (
    CopyBlocks,
    CopyDone,
    RunStep,
    SampledTokens,
    StepDone,
    ToRank,
    message_of_plan,
    plan_of_message,
)
from core.ranks.processes import RankProcesses
from core.step import AdapterLoad, StepPlan, StepResult


def make_part(shards: Sequence[Shard], architecture: ModelArchitecture, exchange: Exchange, sampler: Sampler) -> ModelPart:
    """What exchange.rank computes. architecture: of the whole model."""
    shard = shards[exchange.rank]
    decoder = DecoderPart(
        architecture=shard.narrow(architecture),
        wrap_linears=lambda make_linear: shard_linears(shards, architecture, exchange, make_linear),
    )
    return ModelPart(decoder, sampler, kv_heads=shard.kv_slice)


def shard_linears(
    shards: Sequence[Shard], architecture: ModelArchitecture, exchange: Exchange, make_linear: MakeLinear
) -> MakeLinear:
    """Makes a rank's part of every projection by `make_linear`, and what brings the parts together around it."""
    shard = shards[exchange.rank]

    def make(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        part = make_linear(name, *slice_projection(shard, architecture, name, weight, bias))
        if name.endswith((".o_proj", ".down_proj")):
            return ReducedLinear(part, exchange)
        if name == "lm_head":
            return GatheredLinear(part, [len(other.vocabulary) for other in shards], exchange)
        return part

    return make


class LeadingSampler(Sampler):
    """Samples on rank 0, and tells the other ranks, which wait for it."""

    def __init__(self, eos_token_ids: Sequence[int], ranks: RankProcesses) -> None:
        super().__init__(eos_token_ids)
        self._ranks = ranks

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """See Sampler."""
        token_ids = super().sample(logits, rows)
        self._ranks.send(SampledTokens(token_ids))
        return token_ids


class ParallelRunner:
    """core.step.ModelRunner of rank 0: hands every plan to the other ranks, runs its own part, and waits for theirs.

    A step that fails on any rank ends the node (on_lost of `ranks`): ranks that have come apart compute nothing any more.
    """

    def __init__(self, runner: TorchModelRunner, ranks: RankProcesses) -> None:
        self.adapters = NoAdapters("a node of several ranks (engine.tensor_parallel_size) serves no adapters")
        self.ranks = ranks
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """See core.step.ModelRunner. Raises RankLostError where on_lost returns."""
        try:
            self.ranks.send(message_of_plan(plan))
            result = self._runner.execute(plan)
            self.ranks.wait_step_done(plan.step_id)
            return result
        except AssertionError:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, RankLostError) else f"step {plan.step_id} failed on rank 0: {error!r}"
            self.ranks.report_lost(why)
            raise RankLostError(why) from error

    def close(self) -> None:
        """End the other ranks. Safe to repeat; happens by itself when the process ends."""
        self.ranks.close()


class FollowingSampler(Sampler):
    """On the other ranks: takes what rank 0 has sampled from `receive`."""

    def __init__(self, receive: Callable[[], object]) -> None:
        super().__init__(())
        self._receive = receive

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """The tokens of these rows, whatever the logits, which are rank 0's alone."""
        sampled = self._receive()
        assert isinstance(sampled, SampledTokens) and len(sampled.token_ids) == len(rows), sampled
        return sampled.token_ids


class RankInbox:
    """What comes from rank 0, in order; copies are begun as they come, the rest is handed out. copies: None without a device."""

    def __init__(self, channel: Channel[ToRank], copies: TorchCopies | None) -> None:
        self._channel = channel
        self._copies = copies

    def receive(self) -> ToRank:
        """The next message that is not a copy. Raises RankLostError when rank 0 is gone."""
        while isinstance(message := self._channel.receive(), CopyBlocks):
            self._begin_copy(message)
        return message

    def _begin_copy(self, message: CopyBlocks) -> None:
        """Behind what has been asked of the device so far: every step that rank 0 sent before the copy."""
        assert self._copies is not None, "a rank whose KV is in the connector's memory has nothing to copy"
        mark = self._copies.mark()
        if message.is_save:
            copy = self._copies.copy_in(message.block_ids, message.slots, mark)
        else:
            copy = self._copies.copy_out(message.slots, message.block_ids, mark)
        copy.add_done_callback(lambda ended: self._channel.send(CopyDone(message.copy_id, describe_failure(ended))))


def follow(runner: TorchModelRunner, channel: Channel[ToRank], inbox: RankInbox) -> None:
    """The loop of the other ranks: runs what rank 0 runs, until that is gone."""
    while True:
        try:
            message = inbox.receive()
        except RankLostError:
            return
        assert isinstance(message, RunStep), message
        runner.execute(plan_of_message(message))
        channel.send(StepDone(message.step_id))


def describe_failure(ended: Future[None]) -> str:
    """Why a copy has failed, in words; "" where it has not."""
    if ended.cancelled():
        return "cancelled"
    error = ended.exception()
    return "" if error is None else str(error) or repr(error)


class NoAdapters:
    """core.step.AdapterStore of a node that cannot serve any: every load ends with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._ended: list[AdapterLoad] = []

    def start_load(self, adapter: str, path: str) -> None:
        """See core.step.AdapterStore."""
        self._ended.append(AdapterLoad(adapter, self._reason))

    def poll_loads(self) -> list[AdapterLoad]:
        """See core.step.AdapterStore."""
        ended, self._ended = self._ended, []
        return ended

    def find(self, adapter: str) -> object:
        """Nothing was ever loaded."""
        raise AssertionError(f"no adapter {adapter} is here")

    def drop(self, adapter: str) -> None:
        """See core.step.AdapterStore."""
