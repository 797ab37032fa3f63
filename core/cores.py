"""The CPU cores that a process may run on: as people write them ("0-3,8"), and as the system keeps them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection

_logger = logging.getLogger(__name__)
MAX_CORE = 4095


def parse_cores(text: str) -> list[int]:
    """The cores of a list like "0-3,8", ascending; "" has none. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip(), re.ASCII)
        if found is None:
            raise ValueError(f"{part!r} is no core and no range of cores")
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last or last > MAX_CORE:
            raise ValueError(f"{part!r} is no range of cores up to {MAX_CORE}")
        cores.update(range(first, last + 1))
    return sorted(cores)


def format_cores(cores: Collection[int]) -> str:
    """The other way: [0, 1, 2, 8] is "0-2,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(str(core) for core in part) for part in parts)


def usable_cores() -> list[int]:
    """Those this process may run on, ascending; a container's or taskset's limit counts where the system tells it."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def claim_cores(cores: Collection[int]) -> None:
    """Let the calling thread, and every thread that it will start, run on these cores only. Raises OSError: not all can be had.

    Where the system has no such call, a warning.
    """
    if not hasattr(os, "sched_setaffinity"):
        _logger.warning("this system does not bind processes to cores: node.cpus has no effect")
        return
    if not set(cores) <= set(usable_cores()):
        raise OSError(f"this process may use the cores {format_cores(usable_cores())}")
    os.sched_setaffinity(0, cores)
