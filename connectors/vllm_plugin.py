"""Runs inside vLLM's processes: a vLLM V1 KV connector over any of our stores.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVRelayConnector", "kv_connector_module_path":
        "connectors.vllm_plugin", "kv_role": "kv_both", "kv_connector_extra_config": {"connector": "nvme", "path": "..."}}'

The only file of ours that imports vLLM, and no process of ours imports it. What is decided is in external_prefixes.py (scheduler)
and staged_transfers.py (worker); here is only what is vLLM's: its requests, its tensors, its hooks. Written for 0.32.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connectors.registry import create_connector
from connectors.staging.connector import StagedConnector
from connectors.vllm.external_prefixes import ExternalPrefixes, ScheduledRequest, StepMoves
from connectors.vllm.foreign_keys import AdapterFingerprints, RankLayout
from connectors.vllm.options import OPTIONS, fingerprint_model, read_options
from connectors.vllm.staged_transfers import StagedTransfers, Verdict
from core.clock import MonotonicClock
from core.errors import ConfigError
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import TorchCopies

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's own logger, so that it is shown as vLLM's lines are

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DRAIN_S = 3.0  # what saves on their way get when vLLM ends


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: what its blocks are."""

    rank_layout: RankLayout


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, with each step."""

    moves: StepMoves


@dataclass(frozen=True)
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, after a step: how the store did."""

    verdict: Verdict

    def aggregate(self, other: WorkerNews) -> WorkerNews:
        """Of all ranks."""
        mine, theirs = self.verdict, other.verdict
        return WorkerNews(Verdict(mine.num_successes + theirs.num_successes, mine.num_faults + theirs.num_faults))


class KVRelayConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One object in vLLM's scheduler and one in each of its workers, by `role`. Hooks come from that process's step thread.

    A load happens between steps, while its request waits; a block is copied out of vLLM's cache right after the step that filled
    it, and stored from there. So nothing of vLLM's is ever held back, and a store that hangs costs a load's timeout at most.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_supported(vllm_config, kv_cache_config)
        self._options, connector_options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._clock = MonotonicClock()
        self._connector = create_connector(self._options.connector, connector_options, self._clock)
        self._requests: dict[str, Any] = {}  # scheduler: vLLM's, from admission to end
        self._adapters = AdapterFingerprints()
        self._prefixes: ExternalPrefixes | None = None  # scheduler, once the workers have said what their blocks are
        self._transfers: StagedTransfers | None = None  # worker, once it has its cache
        self._failed_block_ids: set[int] = set()  # worker, as of its last get_finished
        if role is KVConnectorRole.SCHEDULER and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM's default ends a request whose block is lost or damaged. Its scheduler reads this after it has made us.
            logger.info("kv_load_failure_policy is set to recompute: losing KV never fails a request")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later, no more."""
        return False

    # -- scheduler -----------------------------------------------------------------------------------------------------
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """All workers' layouts: the store can be asked from now on. Reads the model's weights once, to name them by content."""
        ranks = [metadata[rank].rank_layout for rank in sorted(metadata)]
        config, transfer_config = self._vllm_config, self._kv_transfer_config
        if len(ranks) != config.parallel_config.tensor_parallel_size or any(rank.layout != ranks[0].layout for rank in ranks):
            raise ValueError(f"KVRelayConnector needs one KV layout, the same, from each tensor-parallel rank; got {ranks}")
        model = fingerprint_model(config.model_config, config.load_config, self._options.model_fingerprint)
        self._connector.register_kv_cache(KVPoolMemory(ranks[0].layout, 1))  # only asked, here: nothing is moved
        self._prefixes = ExternalPrefixes(
            self._connector,
            [rank.namespace(model) for rank in ranks],
            self._clock,
            lookup_timeout_s=self._options.lookup_timeout_s,
            saves=transfer_config.is_kv_producer,
            loads=transfer_config.is_kv_consumer,
            save_output_blocks=self._options.save_output_blocks,
        )
        logger.info(
            "KV is shared through %s: model %s, %s",
            self._options.connector,
            model.hex(),
            ranks[0].details.partition("|layers=")[0],
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's interface says; loads are asynchronous."""
        adapter = self._adapter_of(request)
        if self._prefixes is None or adapter is None or request.mm_features or request.prompt_embeds is not None:
            return 0, False  # content that token ids do not tell
        self._requests[request.request_id] = request
        num_tokens = self._prefixes.num_external_tokens(
            request.request_id, request.all_token_ids, num_computed_tokens, request.cache_salt or "", adapter
        )
        return num_tokens, bool(num_tokens)

    def _adapter_of(self, request: Any) -> bytes | None:
        lora = request.lora_request
        if lora is None:
            return b""
        return None if lora.load_inplace else self._adapters.find(lora.lora_name, lora.lora_path)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM's interface says."""
        if self._prefixes is not None and num_external_tokens:
            self._prefixes.note_allocation(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The loads to start and the blocks to store after this step."""
        if self._prefixes is None:
            return StepMetadata(StepMoves((), ()))
        block_state = scheduler_output.kv_connector_block_state
        scheduled = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if (request := self._requests.get(request_id)) is not None:

                def get_block_ids(request_id: str = request_id) -> Sequence[int]:
                    found: Sequence[Sequence[int]] = block_state.get_block_ids(request_id)
                    return found[0]

                num_computed_tokens = request.num_computed_tokens + num_tokens
                scheduled.append(ScheduledRequest(request_id, request.all_token_ids, num_computed_tokens, get_block_ids))
        return StepMetadata(self._prefixes.plan_step(scheduled))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers found out."""
        if self._prefixes is None:
            return
        if connector_output.invalid_block_ids:
            self._prefixes.note_failed_blocks(connector_output.invalid_block_ids)
        for request_id in connector_output.finished_recving or ():
            self._prefixes.note_ended_load(request_id)
        if connector_output.kv_connector_worker_meta is not None:
            self._prefixes.note_verdict(connector_output.kv_connector_worker_meta.verdict)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed at once: what is stored of them was copied in its steps."""
        self._requests.pop(request.request_id, None)
        if self._prefixes is not None:
            self._prefixes.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """vLLM's way to say that the weights have changed: nothing stored so far is found again by this process."""
        if self._prefixes is not None:
            self._prefixes.begin_generation(os.urandom(16))
        return True

    # -- worker --------------------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Understand vLLM's tensors, or refuse to start; then open the store."""
        caches = _LayerCaches(kv_caches, self._vllm_config, self._kv_cache_config)
        layout = caches.rank_layout.layout
        num_slots = self._options.staging_bytes // layout.block_stride_bytes
        if num_slots < 2:
            raise ConfigError(
                f"{OPTIONS}.staging_bytes", self._options.staging_bytes, f"room for two blocks of {layout.block_bytes} bytes"
            )
        staged = StagedConnector(self._connector, caches.open_copies, self._clock, save_wait_s=0.0)
        staged.register_kv_cache(KVPoolMemory(layout, num_slots))
        self._caches = caches
        self._transfers = StagedTransfers(
            staged,
            layout.block_size,
            self._clock,
            load_timeout_s=self._options.load_timeout_s,
            save_timeout_s=self._options.save_timeout_s,
        )

    def get_handshake_metadata(self) -> RankHandshake:
        """What this worker's blocks are."""
        return RankHandshake(self._caches.rank_layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; none of them is for this step's forward."""
        for move in self._my_part(lambda moves: moves.loads_by_rank):
            self._ready_transfers.start_load(move)

    def wait_for_save(self) -> None:
        """Copy what this step has filled; vLLM reuses blocks only after this."""
        if (
            sys.exc_info()[0] is not None
        ):  # called on the way out of a forward that failed: its blocks are not what they are named
            return
        self._ready_transfers.save(self._my_part(lambda moves: moves.saves_by_rank))

    def _my_part(self, select: Any) -> Sequence[Any]:
        by_rank = select(self._get_connector_metadata().moves)
        return by_rank[self._caches.rank] if by_rank else ()

    @property
    def _ready_transfers(self) -> StagedTransfers:
        assert self._transfers is not None, "register_kv_caches comes first"
        return self._transfers

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request computes only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, after the step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended."""
        news = self._ready_transfers.poll_loads()
        self._failed_block_ids = set(news.failed_block_ids)
        return None, set(news.ended_request_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the same moment as get_finished, which vLLM calls before."""
        return self._failed_block_ids

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """How the store did, if it did anything."""
        verdict = self._ready_transfers.take_verdict()
        return WorkerNews(verdict) if verdict != Verdict() else None

    def shutdown(self) -> None:
        """Bounded, whatever the store does. Safe to repeat."""
        if self._transfers is not None:
            self._transfers.close(_DRAIN_S)
        if self._prefixes is not None:
            self._prefixes.close()


class _LayerCaches:
    """vLLM's cache of one worker: a tensor per layer, of which each block must be one range of bytes."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], vllm_config: Any, kv_cache_config: Any) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        spec, num_blocks = group.kv_cache_spec, kv_cache_config.num_blocks
        names = sorted(name for name in kv_caches if name in group.layer_names)
        # Layers that share one cache have one tensor.
        by_address = {kv_caches[name].data_ptr(): name for name in reversed(names)}
        names = [name for name in names if by_address[kv_caches[name].data_ptr()] == name]
        dtype = kv_caches[names[0]].dtype
        if dtype not in _DTYPES:
            raise ConfigError("kv_cache_dtype", str(dtype), f"one of {', '.join(_DTYPES.values())}")
        layout = KVLayout(len(names), spec.block_size, spec.num_kv_heads, spec.head_size, _DTYPES[dtype])
        self._pages = [_pages(name, kv_caches[name], num_blocks, layout) for name in names]
        parallel = vllm_config.parallel_config
        self.rank = parallel.rank % parallel.tensor_parallel_size
        cache = kv_caches[names[0]]
        details = (
            f"vllm={vllm.__version__}|machine={platform.machine()}|device={cache.device.type}"
            f"|attention={_attention_of(vllm_config, names)}|shape={list(cache.shape[1:])}|order={_order(cache)}"
            f"|tp={self.rank}/{parallel.tensor_parallel_size}|layers={','.join(names)}"
        )
        self.rank_layout = RankLayout(layout, details)

    def open_copies(self, pool: KVPoolMemory) -> TorchCopies:
        """Copies between vLLM's blocks and this memory."""
        self.bind(pool)
        return TorchCopies(self._pages[0].device, self._pages[0].shape[0], pool, self.copy_in, self.copy_out)

    def bind(self, pool: KVPoolMemory) -> None:
        """The memory that copies go to and come from."""
        layout, dtype = pool.layout, self._pages[0].dtype
        slots = torch.frombuffer(pool.buffer, dtype=dtype).view(pool.num_blocks, -1)
        num_elements = layout.block_bytes // dtype.itemsize
        self._slots = slots[:, :num_elements].view(pool.num_blocks, layout.num_layers, -1)

    def copy_in(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """From vLLM's blocks to pool blocks."""
        device, where = torch.tensor(block_ids, device=self._pages[0].device), torch.tensor(slots)
        for layer, pages in enumerate(self._pages):
            self._slots[where, layer] = pages[device].cpu()

    def copy_out(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """From pool blocks to vLLM's blocks."""
        where = torch.tensor(block_ids, device=self._pages[0].device)
        taken = self._slots[torch.tensor(slots)]
        for layer, pages in enumerate(self._pages):
            pages[where] = taken[:, layer].to(pages.device)


def _order(cache: torch.Tensor) -> list[int]:
    """The dimensions of one block, from the outermost in memory to the innermost."""
    return sorted(range(1, cache.dim()), key=lambda dim: (-cache.stride()[dim], dim))


def _pages(name: str, cache: torch.Tensor, num_blocks: int, layout: KVLayout) -> torch.Tensor:
    """[num_blocks, elements of one block of one layer], a view. Raises ConfigError for what is not understood."""
    blocks = cache.permute(0, *_order(cache))
    expected = layout.block_bytes // layout.num_layers
    if cache.shape[0] != num_blocks or not blocks[0].is_contiguous() or blocks[0].nbytes != expected:
        found = f"shape {list(cache.shape)}, strides {list(cache.stride())}, {cache.dtype}"
        raise ConfigError(f"KV cache of {name}", found, f"{num_blocks} blocks first, each one range of {expected} bytes")
    return blocks.view(num_blocks, -1)


def _attention_of(vllm_config: Any, names: Sequence[str]) -> str:
    """Backends and, where a backend packs for an instruction set, which: the order of bytes within a block depends on it."""
    layers = vllm_config.compilation_config.static_forward_context
    kinds = {f"{layers[name].get_attn_backend().get_name()}/{getattr(layers[name], 'isa', '')}" for name in names}
    return "+".join(sorted(kinds))


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, specs = vllm_config.parallel_config, [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # Other kinds (subclasses) keep other things in a block; and where a token sees later ones, a prefix decides nothing.
    is_plain = len(specs) == 1 and type(specs[0]) is FullAttentionSpec and not specs[0].non_causal
    for is_fine, name, value, allowed in (
        (is_plain, "model", [type(spec).__name__ for spec in specs], "one KV cache group of full, causal attention"),
        (vllm_config.speculative_config is None, "speculative_config", "set", "none"),
        (parallel.pipeline_parallel_size == 1, "pipeline_parallel_size", parallel.pipeline_parallel_size, "1"),
        (parallel.decode_context_parallel_size == 1, "decode_context_parallel_size", parallel.decode_context_parallel_size, "1"),
        (
            parallel.prefill_context_parallel_size == 1,
            "prefill_context_parallel_size",
            parallel.prefill_context_parallel_size,
            "1",
        ),
    ):
        if not is_fine:
            raise ConfigError(name, value, f"{allowed}, with KVRelayConnector")
