"""How much memory this process may still take: what the machine has left, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes; None where the system does not tell."""
    found = [_available_on_machine(proc / "meminfo"), *_available_in_groups(proc / "self" / "cgroup", cgroups)]
    known = [num_bytes for num_bytes in found if num_bytes is not None]
    return min(known) if known else None


def _available_on_machine(path: Path) -> int | None:
    kilobytes = _words(path).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _available_in_groups(path: Path, cgroups: Path) -> list[int | None]:
    """One item for each group that this process is in, and for those around it."""
    groups: list[Path] = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroups / controllers
            own = root / name.lstrip("/")
            groups += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return [_available_in_group(group) for group in groups]


def _available_in_group(group: Path) -> int | None:
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")  # version 2, else version 1
    if limit is None or used is None:
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    counts = _words(group / "memory.stat")
    return limit - used + counts.get("total_inactive_file", counts.get("inactive_file", 0))  # the cache gives way


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _words(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file."""
    try:
        fields = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdigit()}
