"""Memory, descriptors and threads of a cluster's processes, sampled while something else happens to them."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024
NUM_AVERAGED = 5  # samples at either end of a comparison: one alone may fall into a burst


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One look at one process. anon_mib leaves out mapped files and shared memory: those belong to the store."""

    at_s: float
    anon_mib: float
    num_descriptors: int
    num_threads: int


@dataclass(slots=True)
class ProcessHistory:
    """One process, from when it was first seen. A node that was started again is another process."""

    name: str
    pid: int
    samples: list[ProcessSample] = field(default_factory=list)

    def growth_mib(self, warm_after_s: float) -> float | None:
        """Anonymous memory at the end minus at the warm point, medians of a few samples; None where it did not live so long."""
        warm = [sample for sample in self.samples if sample.at_s >= self.samples[0].at_s + warm_after_s]
        if len(warm) < 2 * NUM_AVERAGED:
            return None
        first, last = warm[:NUM_AVERAGED], warm[-NUM_AVERAGED:]
        return statistics.median(s.anon_mib for s in last) - statistics.median(s.anon_mib for s in first)


class ProcessSampler:
    """Samples every interval_s from start() to stop(). pids: the processes by name at this moment, called from another thread."""

    def __init__(self, pids: Callable[[], Mapping[str, int]], interval_s: float = 1.0) -> None:
        self.histories: dict[int, ProcessHistory] = {}
        self._pids = pids
        self._interval_s = interval_s
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for it."""
        self._is_stopping.set()
        self._thread.join()

    def growth_mib_by_process(self, warm_after_s: float) -> dict[str, float]:
        """Growth of every process that lived long enough to tell, by "name/pid"."""
        growths = {f"{history.name}/{pid}": history.growth_mib(warm_after_s) for pid, history in self.histories.items()}
        return {name: round(growth, 2) for name, growth in growths.items() if growth is not None}

    def _run(self) -> None:
        while not self._is_stopping.wait(self._interval_s):
            for name, pid in self._pids().items():
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    sample = sample_process(pid)
                    self.histories.setdefault(pid, ProcessHistory(name, pid)).samples.append(sample)


def sample_process(pid: int) -> ProcessSample:
    """Look at one process now. Raises OSError when it is gone, ValueError when it is a zombie."""
    folder = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    if "RssAnon" not in status:
        raise ValueError(f"process {pid} has no memory any more")
    return ProcessSample(
        at_s=time.monotonic(),
        anon_mib=int(status["RssAnon"].split()[0]) * 1024 / MIB,
        num_descriptors=len(list((folder / "fd").iterdir())),
        num_threads=int(status["Threads"]),
    )
