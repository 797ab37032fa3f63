"""The table of ARCHITECTURE.md as data: which room may import which, and which outside packages.

Change both together. A room is named by a module prefix; a module belongs to the room with the longest prefix that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUES = (  # the first row: values, configuration, rendering
    "core.errors",
    "core.addresses",
    "core.clock",
    "core.config",
    "core.cores",
    "core.metrics",
    "core.stats",
    "core.sampling_params",
    "core.model_files",
    "core.adapter_files",
)
NODE_SHELL = ("core.node", "core.node_link", "core.node_session")  # the process around an engine
VALUES_OUTSIDE = frozenset({"msgspec", "yaml", "prometheus_client"})
ANYTHING_OF_OURS = ("core", "connectors", "router", "prefill_node", "decode_node", "deploy", "bench", "tests")


@dataclass(frozen=True, slots=True)
class Room:
    """Module prefixes of ours that a room may import (its own is always allowed), and outside packages."""

    ours: tuple[str, ...] = ()
    outside: frozenset[str] = frozenset()


IMPORT_TABLE: dict[str, Room] = {
    **{name: Room(ours=VALUES, outside=VALUES_OUTSIDE) for name in VALUES},
    "core.kv": Room(ours=VALUES),
    "core.step": Room(ours=VALUES),
    "core.ranks": Room(ours=(*VALUES, "core.step"), outside=frozenset({"msgspec"})),
    "core.wire": Room(ours=(*VALUES, "core.step"), outside=frozenset({"msgspec", "zmq"})),
    "core.grammar": Room(ours=VALUES),
    "core.grammar_compiler": Room(ours=(*VALUES, "core.grammar"), outside=frozenset({"llguidance"})),
    "core.engine_model": Room(ours=(*VALUES, "core.kv.layout", "core.kv.hashing")),
    "core": Room(ours=(*VALUES, "core.kv", "core.step", "core.wire", "core")),
    **{name: Room(ours=("core",), outside=frozenset({"msgspec", "zmq", "prometheus_client"})) for name in NODE_SHELL},
    "core.model": Room(
        ours=(
            *(*VALUES, "core.step", "core.engine_model", "core.ranks"),
            *("core.kv.layout", "core.kv.pool_memory", "core.kv.device_copies", "core.kv.hashing"),
        ),
        outside=frozenset({"torch", "numpy", "safetensors", "transformers", "gguf", "tokenizers", "flash_attn", "msgspec"}),
    ),
    "connectors": Room(ours=(*VALUES, "core.kv"), outside=frozenset({"numpy", "xxhash"})),  # and one client library per file
    "connectors.vllm_plugin": Room(
        ours=(*VALUES, "core.kv", "connectors", "core.model.device_pool"), outside=frozenset({"vllm", "torch"})
    ),
    "connectors.contract": Room(ours=(*VALUES, "core.kv", "connectors"), outside=frozenset({"pytest", "hypothesis"})),
    "prefill_node": Room(ours=("core", "connectors")),
    "decode_node": Room(ours=("core", "connectors")),
    "router": Room(
        ours=(*VALUES, "core.kv.hashing", "core.wire", "core.step", "core.grammar", "core.grammar_compiler"),
        outside=frozenset(
            {"tokenizers", "jinja2", "starlette", "uvicorn", "uvloop", "msgspec", "yaml", "zmq", "prometheus_client"}
        ),
    ),
    "deploy": Room(ours=("core", "connectors", "router", "prefill_node", "decode_node")),
    "bench": Room(ours=ANYTHING_OF_OURS, outside=frozenset({"httpx", "msgspec", "psutil", "tqdm", "numpy", "torch", "zmq"})),
    "bench.vllm_process": Room(outside=frozenset({"vllm"})),  # runs as a program in vLLM's own environment
}

# Files that run inside another engine's process and in none of ours, with what they import of it. Nothing of ours imports them.
PLUGINS_OF_OTHERS: dict[str, frozenset[str]] = {"connectors.vllm_plugin": frozenset({"vllm", "torch"})}

# core as a whole may import its parts, but these rooms are closed to the rest of core: they are handed in.
CLOSED_TO_CORE = ("core.model", "core.grammar_compiler")
# Tests for other projects to run; what we ship imports none of it.
CLOSED_TO_ALL = ("connectors.contract",)

# Words that core may not contain, not even in a string: it does not know which stores there are.
BACKEND_NAMES = ("shm", "nvme", "redis", "ray", "lmcache")
# The default of the configuration has to be some name.
MAY_NAME_BACKENDS = ("core.config",)

FORBIDDEN_EVERYWHERE = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"})


def room_of(module: str, rooms: dict[str, Room]) -> str | None:
    """The room that `module` belongs to: the longest prefix, by whole names."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in rooms:
            return prefix
    return None


def is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether `module` is one of the prefixes or lies below one."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
