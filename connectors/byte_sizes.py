"""Sizes in connector options as people write them: 2GiB, 512MiB, 10G, or a number of bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError

_DECIMAL = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
_UNIT_BYTES = {**_DECIMAL, **{f"{unit}i": 1024**power for power, unit in enumerate(_DECIMAL) if unit}}
MIN_CAPACITY_BYTES, MAX_CAPACITY_BYTES = 4096, 2**50
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_byte_size(field: str, value: object) -> int:
    """Bytes of 1024, "1024", "2GiB" or "1.5G". Raises ConfigError naming `field`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise ConfigError(field, value, "a number of bytes, or one with a unit: KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(float(match[1]) * _UNIT_BYTES[match[2].lower()])


def with_parsed_sizes(options: Mapping[str, Any], names: tuple[str, ...], prefix: str) -> dict[str, Any]:
    """A copy of a connector's options in which the named sizes, where given, are bytes. Raises ConfigError."""
    return {name: parse_byte_size(f"{prefix}.{name}", value) if name in names else value for name, value in options.items()}


def check_capacity(value: int) -> None:
    """Refuse what cannot be meant, before anything is started; how much a block needs is only known later. Raises ConfigError."""
    if not MIN_CAPACITY_BYTES <= value <= MAX_CAPACITY_BYTES:
        raise ConfigError("connector.options.capacity_bytes", value, "4KiB to 1PiB, and room for a block at least")


def readable_bytes(num_bytes: int) -> str:
    """A size for a message: 1.5 GiB."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
