"""Runs steps of a model in torch over the KV pool: keeps each request's tokens and blocks, builds the flat batch, samples.

The scheduler decides what is computed (core/step.py); nothing here chooses. One runner per process, on the step thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.errors import ConfigError
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.adapter_store import TorchAdapterStore
from core.model.attention import AttentionBackend, AttentionBatch
from core.model.attention_cuda import CudaAttention, DecodeBuffers
from core.model.cuda_graphs import DecodeBatch, DecodeGraphs, Record, padded_batch_sizes
from core.model.decoder import DecoderModel
from core.model.description import ModelDescription
from core.model.device_pool import DevicePool, memory_of
from core.model.kernels import choose_native
from core.model.linear import padded_num_rows
from core.model.load_decoder import DecoderPart, load_decoder
from core.model.logit_adjustments import apply_token_masks
from core.model.logprobs import LOGPROB_CHUNK_ROWS, token_logprobs
from core.model.lora import AdapterLayers, AdapterRows
from core.model.sampled_row import SampledRow, TokenCounts
from core.model.sampler import Sampler, is_plain
from core.model.shared_tiles import CascadeRule
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan, StepResult, TokenLogprob

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
IntArray = npt.NDArray[np.int64]


class _GrowingArray:
    """int64 values that are appended to; `values` is a view of those there are, valid until the next append."""

    __slots__ = ("_storage", "length")

    def __init__(self, initial: Sequence[int]) -> None:
        self.length = len(initial)
        self._storage: IntArray = np.empty(max(2 * self.length, 64), dtype=np.int64)
        self._storage[: self.length] = initial

    @property
    def values(self) -> IntArray:
        return self._storage[: self.length]

    def append(self, more: Sequence[int]) -> None:
        needed = self.length + len(more)
        if needed > len(self._storage):
            grown: IntArray = np.empty(2 * needed, dtype=np.int64)
            grown[: self.length] = self.values
            self._storage = grown
        self._storage[self.length : needed] = more
        self.length = needed


class _RequestState:
    """What the runner knows of a request between steps."""

    __slots__ = ("adapter", "block_ids", "counts", "num_computed_tokens", "num_prompt_tokens", "sampling", "token_ids")

    def __init__(self, request: NewRequest) -> None:
        assert request.adapter is None or isinstance(request.adapter, AdapterLayers)
        self.adapter = request.adapter
        self.token_ids = _GrowingArray(request.token_ids)
        self.block_ids = _GrowingArray(request.block_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed_tokens = request.num_computed_tokens
        self.sampling: SamplingParams = request.sampling
        self.counts = TokenCounts(request.num_prompt_tokens) if request.sampling.has_penalties else None


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """One request's share of a step: tokens first_position to end_position, the last of them drafts, at rows first_row on."""

    request_id: str
    state: _RequestState
    first_row: int
    first_position: int
    end_position: int
    drafts: list[int]
    masks: list[bytes]  # of what is sampled; empty: there is no grammar

    @property
    def is_sampled(self) -> bool:
        return self.end_position == self.state.token_ids.length + len(self.drafts)

    @property
    def num_tokens(self) -> int:
        return self.end_position - self.first_position

    @property
    def prompt_successors(self) -> range:
        """Positions of the prompt tokens that this step's rows predict, if the request wants their log-probabilities."""
        if self.state.sampling.prompt_logprobs is None:
            return range(0)
        return range(self.first_position + 1, min(self.end_position + 1, self.state.num_prompt_tokens))

    def token_ids(self) -> IntArray:
        """Those that are known, and the drafts behind them."""
        known = self.state.token_ids.values
        return np.concatenate((known, self.drafts)) if self.drafts else known


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one process computes of a model, and how. kv_heads: of the pool's; None: all."""

    decoder: DecoderPart
    sampler: Sampler
    kv_heads: slice | None = None


class TorchModelRunner:
    """core.step.ModelRunner in torch: the model on the pool's device, batches and sampling on the host."""

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        sampler: Sampler,
        pool: KVPoolMemory | DevicePool,
        adapters: TorchAdapterStore,
        kv_heads: slice | None = None,
    ) -> None:
        """kv_heads: those of the pool's that this runner computes; None: all of them."""
        self.adapters = adapters
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._block_size = pool.layout.block_size
        self._kv_caches = kv_cache_views(pool, kv_heads or slice(None))
        self._device = memory_of(pool).device
        self._num_threads = torch.get_num_threads()
        self._row_multiple = model.row_multiple
        self._sampling_s = self._execution_s = 0.0
        self._requests: dict[str, _RequestState] = {}
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(
        cls,
        model_dir: Path,
        description: ModelDescription,
        pool: KVPoolMemory | DevicePool,
        num_threads: int = 0,
        cascade: CascadeRule | None = None,
        max_lora_rank: int = 64,
        is_batch_invariant: bool = False,
        cpu_kernels: str = "auto",
        part: ModelPart | None = None,
    ) -> TorchModelRunner:
        """Load the weights of `model_dir` for a pool of description.kv_layout, to its device. num_threads 0: what torch chooses.
        cascade: when requests that share blocks read them together (plain torch only); None: where that was measured to pay.
        is_batch_invariant: also on CUDA, by slower kernels. cpu_kernels: see EngineOptions. part: what of the model this process
        computes; None: all of it.

        The number of threads is the process's (torch has one setting). Raises ModelLoadError, or ConfigError if the pool
        has another layout.
        """
        if pool.layout != description.kv_layout:
            raise ConfigError("pool.layout", pool.layout, str(description.kv_layout))
        if num_threads:
            torch.set_num_threads(num_threads)
        architecture, device = description.architecture, memory_of(pool).device
        dtype = TORCH_DTYPES[description.dtype]
        native = choose_native(cpu_kernels, device, dtype)
        part = part or ModelPart(DecoderPart(architecture), Sampler(description.eos_token_ids))
        model, attention = load_decoder(
            model_dir, description, dtype, device, native, cascade, is_batch_invariant, part=part.decoder
        )
        architecture = part.decoder.architecture
        adapters = TorchAdapterStore(architecture, dtype, device, max_lora_rank)
        return cls(model, attention, part.sampler, pool, adapters, part.kv_heads)

    def use_decode_graphs(self, record: Record, max_num_seqs: int, max_model_len: int) -> None:
        """Run steps of decodes, without adapters and of max_num_seqs requests at most, as recordings made by `record`, where the
        attention backend allows it.
        """
        if isinstance(self._attention, CudaAttention) and self._attention.has_static_decodes:
            sizes = padded_batch_sizes(max_num_seqs, self._row_multiple)
            max_blocks = -(-max_model_len // self._block_size)
            self._graphs = DecodeGraphs(self._forward_decodes, record, sizes, max_blocks, self._device)

    def execute(self, plan: StepPlan) -> StepResult:
        """See core.step.ModelRunner. A plan that does not fit what the runner holds is a bug of the scheduler and asserts."""
        started_s = time.perf_counter()
        if torch.get_num_threads() != self._num_threads:  # OpenMP counts them for each thread that calls it
            torch.set_num_threads(self._num_threads)
        self._apply_deltas(plan)
        if not plan.num_scheduled_tokens:
            return StepResult(sampled_token_ids=[])
        with torch.inference_mode():
            scheduled = self._schedule_rows(plan)
            hidden = self._forward(scheduled, plan.num_common_prefix_blocks)
            prompt_logprobs = self._prompt_logprobs(scheduled, hidden)
            sampled, logprobs = self._sample(scheduled, hidden)
        self._execution_s += time.perf_counter() - started_s
        for share, tokens in zip(scheduled, sampled, strict=True):
            share.state.token_ids.append(tokens)
            # What was computed for drafts that were not sampled is void.
            share.state.num_computed_tokens = share.state.token_ids.length - 1 if tokens else share.end_position
        return StepResult(sampled_token_ids=sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds of execute by part since the last call; empty where the model does not measure its own. Step thread."""
        parts = self._model.take_part_seconds()
        if parts:
            parts["sampling"] = self._sampling_s
            parts["Python"] = self._execution_s - sum(parts.values())
        self._sampling_s = self._execution_s = 0.0
        return parts

    def _apply_deltas(self, plan: StepPlan) -> None:
        for request_id in plan.removed_request_ids:
            self._requests.pop(request_id, None)  # a request may end before it was ever scheduled
        for request in plan.new_requests:
            self._requests[request.request_id] = _RequestState(request)
        for request_id, block_ids in plan.new_block_ids.items():
            self._requests[request_id].block_ids.append(block_ids)
        for request_id, token_ids in plan.forced_token_ids.items():
            self._requests[request_id].token_ids.append(token_ids)

    def _schedule_rows(self, plan: StepPlan) -> list[_Scheduled]:
        scheduled = []
        row = 0
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            state = self._requests[request_id]
            first, end = state.num_computed_tokens, state.num_computed_tokens + num_tokens
            drafts = plan.draft_token_ids.get(request_id, [])
            num_known = state.token_ids.length + len(drafts)
            assert num_tokens > 0 and end <= num_known, f"{request_id}: {num_tokens} tokens from {first} on"
            assert not drafts or end == num_known, f"{request_id}: drafts without all the tokens before them"
            assert end <= state.block_ids.length * self._block_size, f"{request_id}: no block for position {end - 1}"
            masks = plan.token_masks.get(request_id, [])
            scheduled.append(_Scheduled(request_id, state, row, first, end, drafts, masks))
            row += num_tokens
        return scheduled

    def _forward(self, scheduled: list[_Scheduled], num_common_blocks: int) -> Tensor:
        """Hidden states of all scheduled tokens (and padding rows), [num_rows, hidden]; writes their KV."""
        num_tokens = scheduled[-1].first_row + scheduled[-1].end_position - scheduled[-1].first_position
        token_ids = np.zeros(-(-num_tokens // self._row_multiple) * self._row_multiple, dtype=np.int64)
        positions = np.zeros_like(token_ids)
        slot_mapping = np.empty(num_tokens, dtype=np.int64)
        block_tables = np.zeros((len(scheduled), max(share.state.block_ids.length for share in scheduled)), dtype=np.int64)
        rows_by_adapter: dict[AdapterLayers, list[IntArray]] = {}
        for i, share in enumerate(scheduled):
            state = share.state
            span = np.arange(share.first_position, share.end_position)
            rows = slice(share.first_row, share.first_row + len(span))
            token_ids[rows] = share.token_ids()[share.first_position : share.end_position]
            positions[rows] = span
            slot_mapping[rows] = state.block_ids.values[span // self._block_size] * self._block_size + span % self._block_size
            block_tables[i, : state.block_ids.length] = state.block_ids.values
            if state.adapter is not None:
                rows_by_adapter.setdefault(state.adapter, []).append(np.arange(rows.start, rows.stop))
        if self._graphs is not None and not rows_by_adapter and num_tokens == len(scheduled):
            decodes = DecodeBatch(token_ids[:num_tokens], positions[:num_tokens], slot_mapping, block_tables)
            if (hidden := self._graphs.try_run(decodes)) is not None:
                return hidden
        self._attention.begin_step(
            AttentionBatch(
                slot_mapping=self._on_device(slot_mapping),
                block_tables=torch.from_numpy(block_tables),
                query_start=torch.tensor([share.first_row for share in scheduled] + [num_tokens]),
                seq_lens=torch.tensor([share.end_position for share in scheduled]),
                num_common_blocks=num_common_blocks,
            )
        )
        adapters = [self._adapter_rows(adapter, np.concatenate(rows)) for adapter, rows in rows_by_adapter.items()]
        return self._model.forward(self._on_device(token_ids), self._on_device(positions), self._kv_caches, adapters, num_tokens)

    def _forward_decodes(self, token_ids: Tensor, positions: Tensor, buffers: DecodeBuffers) -> Tensor:
        """What a recording of decodes holds; see DecodeGraphs."""
        assert isinstance(self._attention, CudaAttention)
        self._attention.begin_decodes(buffers)
        return self._model.forward(token_ids, positions, self._kv_caches)

    def _adapter_rows(self, adapter: AdapterLayers, rows: IntArray) -> AdapterRows:
        padded: IntArray = np.full(padded_num_rows(len(rows)), rows[0])
        padded[: len(rows)] = rows
        return AdapterRows(adapter.layers, self._on_device(padded), len(rows))

    def _on_device(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _sample(self, scheduled: list[_Scheduled], hidden: Tensor) -> tuple[list[list[int]], dict[str, list[TokenLogprob]]]:
        """Sampled tokens in batch order ([] for requests that are not), and log-probabilities of those that asked."""
        row_numbers: list[int] = []
        rows: list[SampledRow] = []
        for share in scheduled:
            if share.is_sampled:
                state, token_ids, num_drafts = share.state, share.token_ids(), len(share.drafts)
                end = share.first_row + share.num_tokens
                row_numbers += range(end - num_drafts - 1, end)
                first_length = len(token_ids) - num_drafts
                masks: Sequence[bytes | None] = share.masks or [None] * (num_drafts + 1)
                if state.counts is not None:
                    state.counts.advance(token_ids[:first_length])
                rows += [
                    # Drafts may come to nothing, so rows behind them are counted anew.
                    SampledRow(state.sampling, token_ids[:length], state.num_prompt_tokens, mask, counts)
                    for length, mask, counts in zip(
                        range(first_length, len(token_ids) + 1), masks, [state.counts] + [None] * num_drafts, strict=True
                    )
                ]
        if not rows:
            return [[] for _ in scheduled], {}
        logits = self._model.logits(hidden[row_numbers])
        if not all(is_plain(row) for row in rows):  # what is plain is chosen where the logits are, and only tokens are copied
            logits = logits.cpu()
        started_s = time.perf_counter()
        apply_token_masks(logits, rows)
        tokens = iter(self._sampler.sample(logits, rows))
        self._sampling_s += time.perf_counter() - started_s
        sampled = [_kept_tokens(share.drafts, tokens) if share.is_sampled else [] for share in scheduled]
        return sampled, _logprobs(scheduled, sampled, logits)

    def _prompt_logprobs(self, scheduled: list[_Scheduled], hidden: Tensor) -> dict[str, list[TokenLogprob]]:
        found: dict[str, list[TokenLogprob]] = {}
        for share in scheduled:
            successors = share.prompt_successors
            if not successors:
                continue
            num_top = share.state.sampling.prompt_logprobs or 0
            logprobs: list[TokenLogprob] = []
            for start in range(successors.start, successors.stop, LOGPROB_CHUNK_ROWS):
                end = min(start + LOGPROB_CHUNK_ROWS, successors.stop)
                first_row = share.first_row + start - 1 - share.first_position
                logits = self._model.logits(hidden[first_row : first_row + end - start]).cpu()
                tokens = share.state.token_ids.values[start:end].tolist()
                logprobs += token_logprobs(logits, tokens, [num_top] * len(tokens))
            found[share.request_id] = logprobs
        return found


def _kept_tokens(drafts: list[int], tokens: Iterator[int]) -> list[int]:
    """Of one request: those of its sampled tokens that follow drafts which came true, and the first."""
    sampled = list(itertools.islice(tokens, len(drafts) + 1))
    num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return sampled[: num_right + 1]


def _logprobs(scheduled: list[_Scheduled], sampled: list[list[int]], logits: Tensor) -> dict[str, list[TokenLogprob]]:
    """Of the sampled tokens of requests that asked. logits: of all rows that were sampled."""
    rows: list[int] = []
    tokens: list[int] = []
    num_tops: list[int] = []
    first_row = 0
    asking: list[tuple[str, int]] = []
    for share, kept in zip(scheduled, sampled, strict=True):
        num_top = share.state.sampling.logprobs
        if kept and num_top is not None:
            asking.append((share.request_id, len(kept)))
            rows += range(first_row, first_row + len(kept))
            tokens += kept
            num_tops += [num_top] * len(kept)
        first_row += len(share.drafts) + 1 if kept else 0
    found = iter(token_logprobs(logits[rows], tokens, num_tops)) if rows else iter(())
    return {request_id: list(itertools.islice(found, num_tokens)) for request_id, num_tokens in asking}


def kv_cache_views(pool: KVPoolMemory | DevicePool, kv_heads: slice = slice(None)) -> list[tuple[Tensor, Tensor]]:
    """Per layer the K and V of the pool, [num_blocks, block_size, num_kv_heads, head_dim], sharing its memory; of some heads.

    Where the layout is of 8-bit numbers (see kv_format.py) these are bytes, and the last dimension is layout.head_bytes.
    """
    blocks = blocks_view(memory_of(pool), pool.layout)[..., kv_heads, :]
    return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(pool.layout.num_layers)]


def blocks_view(memory: Tensor, layout: KVLayout) -> Tensor:
    """memory, [num_blocks, block_stride_bytes] uint8, as [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    flat = memory.view(-1).view(TORCH_DTYPES.get(layout.dtype, torch.uint8))
    head_stride = layout.head_bytes // flat.element_size()
    token_stride = layout.num_kv_heads * head_stride
    kv_stride = layout.block_size * token_stride
    return flat.as_strided(
        (memory.shape[0], layout.num_layers, 2, layout.block_size, layout.num_kv_heads, head_stride),
        (layout.block_stride_bytes // flat.element_size(), 2 * kv_stride, kv_stride, token_stride, head_stride, 1),
    )
