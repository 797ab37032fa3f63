"""One transfer over one connection to a directory: what is asked and sent, which bytes are copied, and what was verified.

Loads are copied here, out of the object store's memory; saves are read by the directory out of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connectors.ray.client import DirectoryConnection
from connectors.ray.messages import ABSENT, LOCATED_BLOCK, Operation, StoreStatus, pack_chain, pack_names, pack_put
from connectors.stored_block import BlockCheck, check_block
from core.kv.pool_memory import KVPoolMemory

_RUN_BYTES = 1024 * 1024  # of a load, copied at once and then verified
_RUNS_PER_JOB = 4  # a thread's share of a load
_PUT_BYTES = 8 * 1024 * 1024  # of a save, asked for at once: whether it should stop is looked at between them
_MAX_OUTSTANDING = 2  # of these, so that the directory need not wait for us

Job = Callable[[], None]


@dataclass(slots=True)
class LoadReport:
    """num_placed blocks, from the first on, were stored; checks: what was found there, by position, unless it was too late."""

    status: StoreStatus
    num_placed: int
    checks: dict[int, BlockCheck] = field(default_factory=dict)


@dataclass(slots=True)
class SaveReport:
    """stored: names that are stored now; num_new of them by this."""

    stored: set[bytes] = field(default_factory=set)
    num_new: int = 0
    status: StoreStatus | None = None


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks that are there: where, and what they should be."""

    store: npt.NDArray[np.uint8]
    places: Sequence[tuple[int, bytes]]  # offset and header
    names: Sequence[bytes]
    block_ids: Sequence[int]
    should_stop: Callable[[], object]
    checks: dict[int, BlockCheck]


class RayLane:
    """Moves blocks between a pool and a store. Any number of threads, each with a connection of its own."""

    def __init__(self, pool: KVPoolMemory, run_jobs: Callable[[Sequence[Job]], None]) -> None:
        """run_jobs: runs all of these, on several threads where it can."""
        self._pool = pool
        self._layout = pool.layout
        self._pool_bytes = np.frombuffer(pool.buffer, dtype=np.uint8)
        self._num_per_run = max(1, _RUN_BYTES // pool.layout.block_bytes)
        self._num_per_put = max(1, _PUT_BYTES // pool.layout.block_bytes)
        self._run_jobs = run_jobs

    def load(
        self,
        connection: DirectoryConnection,
        ancestors: Sequence[bytes],
        names: Sequence[bytes],
        block_ids: Sequence[int],
        should_stop: Callable[[], object],
    ) -> LoadReport:
        """Copy and verify blocks up to the first that is not stored. Raises OSError or ConnectorError.

        What is not what it should be is forgotten by the directory, because it would block its name.
        """
        stream = connection.stream
        answer, status = stream.ask(Operation.LOCATE, pack_chain(ancestors, names), len(names) * LOCATED_BLOCK.size)
        places = list(LOCATED_BLOCK.iter_unpack(answer))
        num_placed = next((position for position, (offset, _) in enumerate(places) if offset == ABSENT), len(names))
        report = LoadReport(status, num_placed)
        load = _Load(connection.store, places[:num_placed], names, block_ids, should_stop, report.checks)
        runs = self._runs(load.places, block_ids)
        self._run_jobs(
            [
                functools.partial(self._copy, load, runs[first : first + _RUNS_PER_JOB])
                for first in range(0, len(runs), _RUNS_PER_JOB)
            ]
        )
        stream.begin()
        stream.send(Operation.RELEASE, b"")
        damaged = [names[position] for position, check in report.checks.items() if check is not BlockCheck.OK]
        if damaged:
            stream.ask(Operation.FORGET, pack_names(damaged), 0)
        return report

    def _runs(self, places: Sequence[tuple[int, bytes]], block_ids: Sequence[int]) -> list[range]:
        """Positions of blocks that are neighbours there and here, so that one copy does; not too many, for verifying soon."""
        stride_bytes = self._layout.block_stride_bytes
        runs: list[range] = []
        for position, (offset, _) in enumerate(places):
            if (
                runs
                and len(runs[-1]) < self._num_per_run
                and places[position - 1][0] + stride_bytes == offset
                and block_ids[position - 1] + 1 == block_ids[position]
            ):
                runs[-1] = range(runs[-1].start, position + 1)
            else:
                runs.append(range(position, position + 1))
        return runs

    def _copy(self, load: _Load, runs: Sequence[range]) -> None:
        layout = self._layout
        for run in runs:
            if load.should_stop():
                return
            offset, start = load.places[run.start][0], load.block_ids[run.start] * layout.block_stride_bytes
            num_bytes = (len(run) - 1) * layout.block_stride_bytes + layout.block_bytes
            if offset + num_bytes > len(load.store):
                load.checks.update(dict.fromkeys(run, BlockCheck.CORRUPT))
                continue
            # Lets go of the GIL, unlike a slice of bytes.
            np.copyto(self._pool_bytes[start : start + num_bytes], load.store[offset : offset + num_bytes])
            for position in run:
                block = self._pool.block(load.block_ids[position])
                load.checks[position] = check_block(load.places[position][1], block, layout.fingerprint, load.names[position])

    def save(
        self,
        connection: DirectoryConnection,
        ancestors: Sequence[bytes],
        names: Sequence[bytes],
        block_ids: Sequence[int],
        should_stop: Callable[[], object],
        are_new: bool,
    ) -> SaveReport:
        """Have blocks stored that are not, in order, while there is room. Raises OSError or ConnectorError.

        are_new: probably none is stored, so that it is not worth asking first.
        """
        stream, kept = connection.stream, [*ancestors, *names]
        report = SaveReport()
        if not are_new:
            flags, report.status = stream.ask(Operation.TOUCH, pack_chain(ancestors, names), len(names))
            report.stored.update(name for name, flag in zip(names, flags, strict=True) if flag)
        stored = report.stored
        first_positions = {name: position for position, name in reversed(list(enumerate(names))) if name not in stored}
        missing = sorted(first_positions.values())
        groups = [missing[first : first + self._num_per_put] for first in range(0, len(missing), self._num_per_put)]
        num_sent = num_answered = 0
        while num_answered < len(groups):
            if num_sent < len(groups) and num_sent - num_answered < _MAX_OUTSTANDING and not should_stop():
                group = groups[num_sent]
                stream.begin()
                group_names, group_ids = [names[position] for position in group], [block_ids[position] for position in group]
                stream.send(Operation.PUT, pack_put(group_names, group_ids, kept))
                num_sent += 1
                continue
            if num_answered == num_sent:  # it should stop
                break
            group = groups[num_answered]
            stream.begin()
            flags, report.status = stream.receive_answer(len(group))
            stored.update(names[position] for position, flag in zip(group, flags, strict=True) if flag)
            report.num_new += flags.count(2)
            num_answered += 1
            if not all(flags):  # no more room
                groups = groups[:num_sent]
        return report
