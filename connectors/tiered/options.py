"""What the tiered connector can be told: its own options, and those of each tier.

tiers: [shm, nvme]                      # fastest first            --connector-option tiers=shm,nvme
nvme: {path: /kv, store_threshold: 2}   # a tier's, by its name    --connector-option nvme.path=/kv
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.byte_sizes import with_parsed_sizes
from connectors.registry import connector_names
from core.config import options_from_mapping
from core.errors import ConfigError, NotRepresentable

_PREFIX = "connector.options"
_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MAX_TIERS = 8
_HIDDEN = NotRepresentable("(not shown)")  # it may be a tier's password


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """One tier. connector: what it is, if its name does not say it. store_threshold: it takes a block when that many requests
    have had it. All else in its mapping is its connector's."""

    connector: str = ""
    store_threshold: int = 1
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.store_threshold <= 1000:
            raise ConfigError(f"{_PREFIX}.{self.name}.store_threshold", self.store_threshold, "1 to 1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredOptions:
    """tiers: fastest first. write: "through" saves into all tiers at once, "back" into the first, which hands down what it is
    about to evict. handoff: the tier that every decode node can read; a prompt counts as handed over once it is there ("": once
    any tier has it). promote: what was loaded from a slower tier is saved into the faster ones.

    prefetch: what a waiting request will need is brought into the first tier before its turn. staging_bytes: memory for that and
    for write: back, none where neither is asked for. lookup_wait_s: how long a lookup waits for a tier that does not know yet.
    hand_down_s: with write: back, how long the last process may take at an orderly end to hand down what only memory has.
    max_seen_blocks bounds what store_threshold remembers, at about 200 bytes each.
    """

    tiers: tuple[str, ...] = ()
    write: str = "through"
    handoff: str = ""
    promote: bool = True
    prefetch: bool = False
    staging_bytes: int = 64 * 1024**2
    lookup_wait_s: float = 0.1
    hand_down_s: float = 5.0
    max_seen_blocks: int = 200_000

    def __post_init__(self) -> None:
        names = ", ".join(self.tiers)
        if not 1 <= len(self.tiers) <= _MAX_TIERS or len(set(self.tiers)) < len(self.tiers):
            raise ConfigError(f"{_PREFIX}.tiers", names, f"1 to {_MAX_TIERS} different names, fastest first, such as shm,nvme")
        if self.write not in ("through", "back"):
            raise ConfigError(f"{_PREFIX}.write", self.write, "through or back")
        if self.handoff and self.handoff not in self.tiers:
            raise ConfigError(f"{_PREFIX}.handoff", self.handoff, f"one of the tiers {names}")
        for name, low, high in (
            ("staging_bytes", 1, 2**40),
            ("lookup_wait_s", 0.0, 60.0),
            ("hand_down_s", 0.0, 3600.0),
            ("max_seen_blocks", 1024, 100_000_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{_PREFIX}.{name}", getattr(self, name), f"{low} to {high}")


def parse_tiered_options(options: Mapping[str, Any]) -> tuple[TieredOptions, list[TierOptions]]:
    """From the free-form mapping. Raises ConfigError with the full name of what is wrong."""
    names = _tier_names(options.get("tiers", ""))
    known = {option.name for option in dataclasses.fields(TieredOptions)}
    own: dict[str, Any] = {}
    by_tier: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        tier, dot, leaf = key.partition(".")
        if tier not in by_tier:
            if dot:
                raise ConfigError(f"{_PREFIX}.{key}", _HIDDEN, f"an option of one of the tiers {', '.join(names)}")
            if key not in known:
                allowed = f"one of the options {', '.join(sorted(known))}, or of the tiers {', '.join(names)}"
                raise ConfigError(f"{_PREFIX}.{key}", _HIDDEN, allowed)
            own[key] = value
        elif dot:
            by_tier[tier][leaf] = value
        elif isinstance(value, Mapping):
            by_tier[tier].update(value)
        else:
            raise ConfigError(f"{_PREFIX}.{key}", _HIDDEN, "a mapping of the tier's options, or KEY=VALUE as in shm.name=mine")
    own["tiers"] = tuple(names)
    sized = with_parsed_sizes(own, ("staging_bytes",), _PREFIX)
    tiered: TieredOptions = options_from_mapping(TieredOptions, sized, _PREFIX)
    tiers = [_tier_options(name, by_tier[name]) for name in names]
    handoff = tiered.handoff or names[0]
    for parsed in tiers:
        if parsed.store_threshold > 1 and parsed.name == handoff:
            allowed = "1 for the tier through which prompts go from prefill to decode nodes; put it on a slower one"
            raise ConfigError(f"{_PREFIX}.{parsed.name}.store_threshold", parsed.store_threshold, allowed)
    return tiered, tiers


def check_tier_connectors(tiers: Sequence[TierOptions]) -> None:
    """Raises ConfigError for a tier that is no connector, about the option that says so."""
    known = [name for name in connector_names() if name != "tiered"]
    for tier in tiers:
        if tier.connector not in known:
            if tier.connector != tier.name:
                raise ConfigError(f"{_PREFIX}.{tier.name}.connector", tier.connector, f"one of {', '.join(known)}")
            allowed = f"names of connectors, fastest first: {', '.join(known)}, or others with {tier.name}.connector=one of them"
            raise ConfigError(f"{_PREFIX}.tiers", tier.name, allowed)


def _tier_names(value: object) -> list[str]:
    names = value.split(",") if value and isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{_PREFIX}.tiers", value, "names of connectors, fastest first, such as shm,nvme,redis")
    stripped = [name.strip() for name in names]
    reserved = {option.name for option in dataclasses.fields(TieredOptions)}
    for name in stripped:
        if not _TIER_NAME.fullmatch(name) or name in reserved or name == "tiered":
            raise ConfigError(f"{_PREFIX}.tiers", name, "names of connectors other than tiered, of lower-case letters and digits")
    return stripped


def _tier_options(name: str, mapping: Mapping[str, Any]) -> TierOptions:
    ours = {key: mapping[key] for key in ("connector", "store_threshold") if key in mapping}
    rest = {key: value for key, value in mapping.items() if key not in ours}
    parsed: TierOptions = options_from_mapping(TierOptions, {"name": name, **ours}, f"{_PREFIX}.{name}")
    connector = parsed.connector or name
    if connector == "tiered":
        raise ConfigError(f"{_PREFIX}.{name}.connector", connector, "a connector other than tiered")
    return dataclasses.replace(parsed, connector=connector, options=rest)
