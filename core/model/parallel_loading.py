"""Starts the ranks of a node: the memory and sockets between them, the processes, and each one's share of the model.

load_parallel() is rank 0's, load_rank() the others'.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.config import EngineOptions
from core.errors import ConfigError
from core.kv.device_copies import OpenCopies
from core.kv.pool_memory import KVPoolMemory, open_memory_file
from core.model.description import ModelDescription
from core.model.device_pool import DevicePool, find_device
from core.model.exchange import Exchange, SharedMemoryExchange, exchange_bytes, open_process_group
from core.model.parallel import FollowingSampler, LeadingSampler, ParallelRunner, RankInbox, make_part
from core.model.rank_copies import RankedCopies, open_head_copies
from core.model.runner import TorchModelRunner
from core.model.sampler import Sampler
from core.model.shards import Shard, split_model
from core.ranks.channel import Channel
from core.ranks.messages import RankSetup, ToRank
from core.ranks.processes import RankProcesses, end_process


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """connector_memory, open_copies: as in loading.LoadedModel."""

    runner: ParallelRunner
    connector_memory: KVPoolMemory
    open_copies: OpenCopies | None


def load_parallel(
    model_dir: Path,
    description: ModelDescription,
    engine: EngineOptions,
    num_blocks: int,
    num_slots: int = 0,
    on_lost: Callable[[str], None] = end_process,
) -> ParallelModel:
    """Start engine.tensor_parallel_size - 1 processes, and load what is this one's. Call from the main thread.

    num_slots 0: the KV pool is host memory, which all ranks and the connector share. Else each rank has a pool of its heads on
    its device, and what the connector sees is a staging pool of so many slots. on_lost: see RankProcesses. Raises ConfigError
    or ModelLoadError.
    """
    num_ranks = engine.tensor_parallel_size
    if description.quantization != "none" or description.kv_layout.dtype != description.dtype:
        allowed = "1 with model.quantization, or with a model.kv_cache_dtype other than model.dtype"
        raise ConfigError("engine.tensor_parallel_size", num_ranks, allowed)
    shards = split_model(description.architecture, num_ranks)
    devices = _devices_of(engine.device, num_ranks)
    is_on_cuda = devices[0] != "cpu"
    try:
        memory = KVPoolMemory.shared(description.kv_layout, num_slots or num_blocks)
        exchange_fd = open_memory_file("kvrelay-exchange", 0 if is_on_cuda else exchange_bytes(num_ranks))
    except OSError as error:
        raise ConfigError("engine.tensor_parallel_size", num_ranks, f"1, or memory that processes share ({error})") from error
    sockets = connect_pairwise(num_ranks)
    setups = [
        RankSetup(
            rank=rank,
            num_ranks=num_ranks,
            model_dir=str(model_dir),
            description=msgspec.msgpack.encode(description),
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_threads=engine.num_threads or _threads_per_rank(num_ranks),
            device=devices[rank],
            cpu_kernels=engine.cpu_kernels,
            timeout_s=engine.rank_timeout_s,
            pool_fd=memory.descriptor,
            exchange_fd=exchange_fd,
            peer_fds=[-1 if peer is None else peer.fileno() for peer in sockets[rank]],
        )
        for rank in range(num_ranks)
    ]
    ranks = RankProcesses(setups[1:], engine.rank_timeout_s, on_lost)
    try:
        for peer in (peer for row in sockets[1:] for peer in row if peer is not None):
            peer.close()  # theirs now: the last copy must be, so that its end is noticed
        sampler = LeadingSampler(description.eos_token_ids, ranks)
        pool = _make_pool(setups[0], description, shards[0], memory)
        runner = _load_share(setups[0], description, shards, pool, sockets[0], sampler)
        ranks.wait_ready()
    except BaseException:
        ranks.close()
        raise
    finally:
        os.close(exchange_fd)

    def open_copies(staging: KVPoolMemory) -> RankedCopies:
        assert isinstance(pool, DevicePool) and staging is memory, "the ranks have the staging pool that was made for them"
        return RankedCopies(open_head_copies(pool, staging, shards[0].kv_slice), ranks)

    return ParallelModel(ParallelRunner(runner, ranks), memory, open_copies if num_slots else None)


def load_rank(setup: RankSetup, channel: Channel[ToRank]) -> tuple[TorchModelRunner, RankInbox]:
    """What a rank other than 0 needs for parallel.follow. Raises ConfigError or ModelLoadError."""
    description = msgspec.msgpack.decode(setup.description, type=ModelDescription)
    shards = split_model(description.architecture, setup.num_ranks)
    memory = KVPoolMemory(description.kv_layout, setup.num_slots or setup.num_blocks, setup.pool_fd)
    peers = [None if fd < 0 else socket.socket(fileno=fd) for fd in setup.peer_fds]
    pool = _make_pool(setup, description, shards[setup.rank], memory)
    copies = open_head_copies(pool, memory, shards[setup.rank].kv_slice) if isinstance(pool, DevicePool) else None
    inbox = RankInbox(channel, copies)
    return _load_share(setup, description, shards, pool, peers, FollowingSampler(inbox.receive)), inbox


def _make_pool(setup: RankSetup, description: ModelDescription, shard: Shard, memory: KVPoolMemory) -> KVPoolMemory | DevicePool:
    """Where this rank's KV is: among the other ranks' in `memory`, or by itself on its device."""
    if not setup.num_slots:
        return memory
    layout = dataclasses.replace(description.kv_layout, num_kv_heads=len(shard.kv_heads))
    return DevicePool.allocate(layout, setup.num_blocks, find_device(setup.device))


def _load_share(
    setup: RankSetup,
    description: ModelDescription,
    shards: Sequence[Shard],
    pool: KVPoolMemory | DevicePool,
    peers: Sequence[socket.socket | None],
    sampler: Sampler,
) -> TorchModelRunner:
    exchange: Exchange
    if find_device(setup.device).type == "cuda":
        device = find_device(setup.device)
        exchange = open_process_group(device, setup.exchange_fd, setup.rank, setup.num_ranks, setup.timeout_s)
    else:
        exchange = SharedMemoryExchange(setup.rank, setup.exchange_fd, peers, setup.timeout_s)
    part = make_part(shards, description.architecture, exchange, sampler)
    if isinstance(pool, DevicePool):  # it has no heads but this rank's
        part = dataclasses.replace(part, kv_heads=None)
        description = dataclasses.replace(description, kv_layout=pool.layout)
    return TorchModelRunner.load(
        Path(setup.model_dir), description, pool, setup.num_threads, cpu_kernels=setup.cpu_kernels, part=part
    )


def _devices_of(device: str, num_ranks: int) -> list[str]:
    """By rank: cuda:N is rank 0's, and those after it the others'. Raises ConfigError for one that is not there."""
    first = find_device(device)
    names = ["cpu"] * num_ranks if first.type == "cpu" else [f"cuda:{(first.index or 0) + rank}" for rank in range(num_ranks)]
    for name in names:
        find_device(name)
    return names


def connect_pairwise(num_ranks: int) -> list[list[socket.socket | None]]:
    """A socket for every rank (first index) and every other one (second); None for itself. Messages keep their bounds."""
    sockets: list[list[socket.socket | None]] = [[None] * num_ranks for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank):
            sockets[rank][other], sockets[other][rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return sockets


def _threads_per_rank(num_ranks: int) -> int:
    """Of the cores that this process may use."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // num_ranks)
