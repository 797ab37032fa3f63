"""The one configuration tree: frozen, validated at process start, from a YAML file, environment variables and flags.

Later sources win: defaults, then the file, then KVRELAY_SECTION_KEY variables, then flags. Only this file reads the
environment.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from core.addresses import host_of, is_loopback
from core.errors import ConfigError

MIB = 1024 * 1024
DEFAULT_MODEL = "smollm2"
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
KV_EVENT_POLICIES = ("kv_aware",)  # what they decide by comes with the nodes' KV events
DTYPES = ("bfloat16", "float16", "float32")
ENVIRONMENT_PREFIX = "KVRELAY_"
EXIT_USAGE = 2  # of every process whose user made a mistake
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _check(condition: bool, field_name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(field_name, value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model. path: an alias (smollm2) or a Hugging Face folder. max_model_len 0: what the model was made for."""

    path: str = DEFAULT_MODEL
    served_name: str = ""
    dtype: str = "bfloat16"
    max_model_len: int = 0

    def __post_init__(self) -> None:
        _check(self.dtype in DTYPES, "model.dtype", self.dtype, " or ".join(DTYPES))
        _check(self.max_model_len >= 0, "model.max_model_len", self.max_model_len, "0 (the model's own) or more")
        _check(bool(self.path), "model.path", self.path, "an alias or a folder")
        _check(len(self.name) <= 512, "model.served_name", self.name, "at most 512 characters")

    @property
    def name(self) -> str:
        """The name that clients use: served_name, else the alias, else the folder's last part."""
        return self.served_name or Path(self.path).absolute().name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One engine. kv_pool_mib sizes the pool unless num_blocks is set. long_prefill_token_threshold 0: no cap on a chunk.

    max_long_partial_prefills: while so many prompts are being computed of which more than a capped chunk is left, other such ones
    let shorter ones pass (0: nobody jumps the queue).
    policy: fcfs or priority (lower value first, then earlier arrival). priority_aging_s: waiting that long raises a priority by
    one level, so that nobody waits for ever (0: never). scheduler_delay_factor: while others decode, a prompt waits this many
    times the latency of the last step with a prompt, so that several are computed together (0: not at all). save_decode_blocks:
    store blocks that fill while decoding, so that a request can move to another node by a prefix hit. overlap_steps: on, off or
    auto: schedule a step while the one before it runs. num_speculative_tokens: drafts to verify per request and step, 0: none;
    then steps do not overlap. They are what followed the last prompt_lookup_max (or fewer, down to prompt_lookup_min) tokens
    before. speculative_disable_by_batch_size: with more requests running nothing is drafted, since rows then cost more than
    steps. jump_decoding: tokens that a grammar leaves no choice about are appended without sampling them, one step each.
    kv_load_policy: auto loads KV from the store when that is predicted to be faster than computing it, always does not ask.
    num_threads 0: what torch chooses. device: where weights and KV are: cpu, cuda or cuda:N. staging_mib: pinned host memory
    through which KV passes between a CUDA device and the store. max_loras: LoRA adapters among the requests of one step (0: none
    are served); max_cpu_loras: adapters kept in memory, beyond which the one used longest ago is dropped, to be read again;
    max_lora_rank: of one adapter.
    """

    block_size: int = 16
    kv_pool_mib: int = 1024
    num_blocks: int = 0
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 128
    max_num_waiting: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 0
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    priority_aging_s: float = 0.0
    scheduler_delay_factor: float = 0.0
    save_decode_blocks: bool = True
    overlap_steps: str = "auto"
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    speculative_disable_by_batch_size: int = 2
    jump_decoding: bool = True
    kv_load_policy: str = "auto"
    num_threads: int = 0
    device: str = "cpu"
    staging_mib: int = 512
    max_loras: int = 4
    max_cpu_loras: int = 16
    max_lora_rank: int = 64
    lookup_timeout_s: float = 1.0
    kv_load_timeout_s: float = 10.0
    kv_save_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_pool_mib", "staging_mib", "max_num_batched_tokens", "max_num_seqs", "max_num_waiting"):
            _check(getattr(self, name) >= 1, f"engine.{name}", getattr(self, name), "1 or more")
        for name in ("num_blocks", "long_prefill_token_threshold", "max_long_partial_prefills", "num_threads", "max_loras"):
            _check(getattr(self, name) >= 0, f"engine.{name}", getattr(self, name), "0 or more")
        for name in ("priority_aging_s", "scheduler_delay_factor"):
            _check(0 <= getattr(self, name) < math.inf, f"engine.{name}", getattr(self, name), "0 (off) or more")
        for name in ("lookup_timeout_s", "kv_load_timeout_s", "kv_save_timeout_s"):
            _check(getattr(self, name) > 0, f"engine.{name}", getattr(self, name), "above 0")
        is_device = re.fullmatch("cpu|cuda(:(0|[1-9][0-9]?))?", self.device) is not None
        _check(is_device, "engine.device", self.device, "cpu, cuda or cuda:N")
        most = "at least engine.max_loras"
        _check(
            self.max_cpu_loras >= max(1, self.max_loras), "engine.max_cpu_loras", self.max_cpu_loras, f"{most} ({self.max_loras})"
        )
        _check(1 <= self.max_lora_rank <= 1024, "engine.max_lora_rank", self.max_lora_rank, "1 to 1024")
        _check(self.policy in ("fcfs", "priority"), "engine.policy", self.policy, "fcfs or priority")
        _check(self.overlap_steps in ("auto", "on", "off"), "engine.overlap_steps", self.overlap_steps, "auto, on or off")
        drafted, longest, shortest = self.num_speculative_tokens, self.prompt_lookup_max, self.prompt_lookup_min
        _check(0 <= drafted <= 32, "engine.num_speculative_tokens", drafted, "0 to 32")
        limit = self.speculative_disable_by_batch_size
        _check(limit >= 1, "engine.speculative_disable_by_batch_size", limit, "1 or more")
        _check(1 <= longest <= 32, "engine.prompt_lookup_max", longest, "1 to 32")
        _check(1 <= shortest <= longest, "engine.prompt_lookup_min", shortest, f"1 to engine.prompt_lookup_max ({longest})")
        limit = self.max_long_partial_prefills
        is_long_known = limit == 0 or self.long_prefill_token_threshold > 0
        _check(is_long_known, "engine.max_long_partial_prefills", limit, "0 without engine.long_prefill_token_threshold")
        _check(self.kv_load_policy in ("auto", "always"), "engine.kv_load_policy", self.kv_load_policy, "auto or always")
        _check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "engine.max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least engine.max_num_seqs ({self.max_num_seqs}), so that every running request gets a token a step",
        )

    @property
    def overlaps_steps(self) -> bool:
        """auto: where the model does not compute on the cores that schedule."""
        return self.overlap_steps == "on" or (self.overlap_steps == "auto" and self.device != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Which store moves KV between nodes. `options` goes to the connector, which validates it."""

    name: str = "shm"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """HTTP and control addresses, admission limits and deadlines. control_port 0: the HTTP port + 1.

    control_host: where nodes register; beyond loopback only with security.keys. It does not follow host, so that serving HTTP to
    others opens nothing else. api_keys_file: made by `kvrelay keys api`; "" asks clients for no key, and answers administrators'
    questions only on loopback. cache_salt_per_key: clients with different API keys never share cached KV.
    chat_template: a file in place of the model's own template. tool_call_parser: how the model writes calls to tools (see
    TOOL_CALL_PARSERS); "" guesses by the template.
    A client has header_timeout_s for a request's line and headers, also when its connection is new and silent, then
    body_timeout_s for the body, and is cut when it takes nothing of its answer for send_timeout_s.

    local_prefill_max_tokens: prompts up to this length skip the prefill node (0: up to one block, which cannot be handed over).
    policy: which node gets a request: least_loaded, round_robin, power_of_two_choices (the less loaded of two drawn ones),
    session_sticky (a session's requests at one node) or kv_aware (the least predicted time, by measured costs and what caches
    hold). policy_temperature: kv_aware spreads requests: a node that costs (1 + temperature) times the least is chosen 1/e times
    as often (0: always the best). itl_target_ms: with kv_aware, a decode node takes prompts beside requests that decode only
    as long as their next tokens are predicted to come within it (0: no target).
    prefill_timeout_s: how long PrefillDone may take before the decode node does it all; max_attempts bounds dispatches
    of one request over all nodes, max_node_deaths the nodes that may die while they have it. step_stall_timeout_s: a node
    whose step thread has not moved for so long gets nothing new and loses its requests to others. drain_timeout_s: how long a
    draining node may finish what it has before the rest moves to other nodes.
    kv_events: whether nodes tell the router which blocks their caches hold; auto: when the policy decides by that.
    lora_modules: LoRA adapters that are served from the start, folders by name, as every node finds them.
    allow_runtime_lora_updating: administrators may load and unload adapters, which makes all nodes read a folder that they name.
    http_fd: an inherited socket that listens already
    (-1: bind host and port), so that connections wait while a router is replaced.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 0
    api_keys_file: str = ""
    chat_template: str = ""
    tool_call_parser: str = ""
    cache_salt_per_key: bool = True
    policy: str = "least_loaded"
    policy_temperature: float = 0.0
    itl_target_ms: float = 0.0
    max_num_requests: int = 1024
    max_body_bytes: int = 16 * MIB
    max_choices: int = 64
    max_connections: int = 4096
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 15.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    prefill_timeout_s: float = 120.0
    node_wait_s: float = 20.0
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    max_attempts: int = 4
    max_node_deaths: int = 3
    local_prefill_max_tokens: int = 0
    step_stall_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    kv_events: str = "auto"
    lora_modules: dict[str, str] = field(default_factory=dict)
    allow_runtime_lora_updating: bool = False
    http_fd: int = -1

    @property
    def wants_kv_events(self) -> bool:
        """Whether nodes are to tell what their caches hold."""
        return self.kv_events == "on" or (self.kv_events == "auto" and self.policy in KV_EVENT_POLICIES)

    def __post_init__(self) -> None:
        for name in ("policy_temperature", "itl_target_ms"):
            value = getattr(self, name)
            _check(math.isfinite(value) and value >= 0, f"router.{name}", value, "a finite number, 0 or more")
        _check(self.kv_events in ("auto", "on", "off"), "router.kv_events", self.kv_events, "auto, on or off")
        _check(0 <= self.port <= 65535, "router.port", self.port, "0 to 65535")
        _check(0 <= self.control_port <= 65535, "router.control_port", self.control_port, "0 to 65535")
        for name in (
            *("max_num_requests", "max_body_bytes", "max_choices", "max_attempts", "max_node_deaths"),
            *("max_connections", "max_header_bytes"),
        ):
            _check(getattr(self, name) >= 1, f"router.{name}", getattr(self, name), "1 or more")
        _check(
            self.tool_call_parser in ("", *TOOL_CALL_PARSERS),
            "router.tool_call_parser",
            self.tool_call_parser,
            f"one of {', '.join(TOOL_CALL_PARSERS)}, or none to guess by the chat template",
        )
        for name, path in self.lora_modules.items():
            is_module = 1 <= len(name) <= 256 and bool(path)
            _check(is_module, "router.lora_modules", f"{name}={path}", "NAME=PATH, a name of at most 256 characters and a folder")
        _check(self.drain_timeout_s >= 0, "router.drain_timeout_s", self.drain_timeout_s, "0 (hand over at once) or more")
        for name in (
            "request_timeout_s",
            "prefill_timeout_s",
            "heartbeat_interval_s",
            "heartbeat_timeout_s",
            "step_stall_timeout_s",
            "header_timeout_s",
            "body_timeout_s",
            "send_timeout_s",
        ):
            _check(getattr(self, name) > 0, f"router.{name}", getattr(self, name), "above 0")
        _check(
            self.heartbeat_timeout_s >= 2 * self.heartbeat_interval_s,
            "router.heartbeat_timeout_s",
            self.heartbeat_timeout_s,
            f"at least twice router.heartbeat_interval_s ({self.heartbeat_interval_s})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """One node's process. router: HOST:PORT of the router's control address. metrics_port -1: no metrics server, 0: any port."""

    router: str = "127.0.0.1:8001"
    node_id: str = ""
    metrics_port: int = 0

    def __post_init__(self) -> None:
        host, _, port = self.router.rpartition(":")
        is_address = bool(host) and port.isdigit() and 1 <= int(port) <= 65535
        _check(is_address, "node.router", self.router, "HOST:PORT, with a port from 1 to 65535")
        is_name = len(self.node_id) <= 128 and all("!" <= char <= "~" for char in self.node_id)
        _check(is_name, "node.node_id", self.node_id, "at most 128 printable ASCII characters without spaces")
        _check(-1 <= self.metrics_port <= 65535, "node.metrics_port", self.metrics_port, "-1 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How many nodes of each role `kvrelay serve` starts."""

    prefill: int = 1
    decode: int = 1

    def __post_init__(self) -> None:
        _check(self.prefill >= 0, "cluster.prefill", self.prefill, "0 or more")
        _check(self.decode >= 1, "cluster.decode", self.decode, "1 or more: only decode nodes can finish a request")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """keys: the folder that `kvrelay keys` made, for router and nodes; "" leaves their connections in the clear, on loopback."""

    keys: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree."""

    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    connector: ConnectorOptions = field(default_factory=ConnectorOptions)
    router: RouterOptions = field(default_factory=RouterOptions)
    node: NodeOptions = field(default_factory=NodeOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    security: SecurityOptions = field(default_factory=SecurityOptions)

    def __post_init__(self) -> None:
        if not self.security.keys:
            allowed = (
                "a loopback address (127.0.0.1, ::1, localhost), or any with security.keys: make them with `kvrelay keys DIR`"
            )
            _check(is_loopback(self.router.control_host), "router.control_host", self.router.control_host, allowed)
            _check(is_loopback(host_of(self.node.router)), "node.router", self.node.router, allowed)


# Flags that users of other engines expect, beside the --section.key form that every key has.
SHORT_FLAGS = {
    "--model": "model.path",
    "--served-model-name": "model.served_name",
    "--dtype": "model.dtype",
    "--max-model-len": "model.max_model_len",
    "--connector": "connector.name",
    "--host": "router.host",
    "--port": "router.port",
    "--control-host": "router.control_host",
    "--control-port": "router.control_port",
    "--api-keys-file": "router.api_keys_file",
    "--chat-template": "router.chat_template",
    "--tool-call-parser": "router.tool_call_parser",
    "--keys": "security.keys",
    "--router": "node.router",
    "--node-id": "node.node_id",
    "--metrics-port": "node.metrics_port",
    "--prefill": "cluster.prefill",
    "--decode": "cluster.decode",
    "--block-size": "engine.block_size",
    "--num-blocks": "engine.num_blocks",
    "--max-num-seqs": "engine.max_num_seqs",
    "--max-num-batched-tokens": "engine.max_num_batched_tokens",
}


MAPPING_KEYS = {"router.lora_modules": "--lora-modules"}  # given as NAME=PATH, several times or several at once
HIDDEN_FLAGS = ("router.http_fd",)  # for programs that start a router, not for people


class OneLineParser(argparse.ArgumentParser):
    """argparse whose error is one line, like every other message about a user's mistake."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with EXIT_USAGE."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse_config(prog: str, description: str, sections: Sequence[str], argv: Sequence[str] | None) -> Config:
    """A process's configuration from its command line. Raises ConfigError; a flag that does not exist ends the process."""
    parser = OneLineParser(prog=prog, description=description, allow_abbrev=False)
    add_config_flags(parser, sections)
    return load_config(vars(parser.parse_args(argv)))


def add_config_flags(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    """Add --config, --connector-option, every key of `sections` as --section.key, and the short names to an argparse parser."""
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    short_by_key: dict[str, list[str]] = {}
    for flag, key in SHORT_FLAGS.items():
        short_by_key.setdefault(key, []).append(flag)
    hints = typing.get_type_hints(Config)
    for section in sections:
        for leaf in dataclasses.fields(hints[section]):
            key = f"{section}.{leaf.name}"
            if key == "connector.options":
                parser.add_argument(
                    "--connector-option", action="append", default=[], metavar="KEY=VALUE", help="option of the connector"
                )
                continue
            if key in MAPPING_KEYS:
                parser.add_argument(
                    *(MAPPING_KEYS[key], f"--{key}"),
                    dest=key,
                    action="extend",
                    nargs="+",
                    metavar="NAME=PATH",
                    help="several, or again; default none",
                )
                continue
            names = [*short_by_key.get(key, []), f"--{key}"]
            text = argparse.SUPPRESS if key in HIDDEN_FLAGS else f"default {leaf.default!r}"
            parser.add_argument(*names, dest=key, default=None, metavar=leaf.name.upper(), help=text)


def load_config(flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """Build the tree from a parsed argparse namespace's dict (see add_config_flags) and the environment.

    Raises ConfigError naming the field, the value and what is allowed.
    """
    given = dict(flags or {})
    tree: dict[str, Any] = {}
    path = given.pop("config", None)
    if path:
        tree = _read_yaml(Path(path))
    variables = os.environ if environment is None else environment
    _check_variables(variables)
    for key in _keys():
        variable = ENVIRONMENT_PREFIX + key.replace(".", "_").upper()
        if variable in variables:
            _set(tree, key, variables[variable].split(",") if key in MAPPING_KEYS else variables[variable])
        if given.get(key) is not None:
            _set(tree, key, given[key])
    for item in given.get("connector_option") or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError("--connector-option", item, "KEY=VALUE")
        connector = tree.setdefault("connector", {})
        options = connector.get("options") or {}
        if not isinstance(options, dict):
            raise ConfigError("connector.options", options, "a mapping of keys to values")
        connector["options"] = {**options, name: _option_of(value)}
    config: Config = _convert(tree, Config, prefix="")
    return config


def options_from_mapping(options_type: type[Any], options: Mapping[str, Any], prefix: str) -> Any:
    """Build a connector's own frozen options dataclass from the free-form mapping. Raises ConfigError."""
    known = {leaf.name for leaf in dataclasses.fields(options_type)}
    for name, value in options.items():
        if name not in known:
            allowed = f"one of the options {', '.join(sorted(known))}" if known else "nothing: there are no options"
            raise ConfigError(f"{prefix}.{name}", value, allowed)
    return _convert(dict(options), options_type, prefix=f"{prefix}.")


def user_cache_dir() -> Path:
    """Where converted models are kept: KVRELAY_CACHE_DIR, else XDG_CACHE_HOME/kvrelay, else ~/.cache/kvrelay."""
    if explicit := os.environ.get("KVRELAY_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def router_api_key() -> str:
    """The API key for questions to a router: KVRELAY_API_KEY, or "". Raises ConfigError, which does not show it."""
    key = os.environ.get("KVRELAY_API_KEY", "").strip()
    _check(key.isascii() and (key == "" or key.isprintable()), "KVRELAY_API_KEY", "(not shown)", "a key of printable characters")
    return key


def config_to_yaml(config: Config) -> str:
    """The tree as YAML that load_config reads back unchanged."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _option_of(text: str) -> Any:
    """What a flag gives an option: a list or mapping in YAML's brackets, else the text, which the option's type then converts.

    YAML would make numbers, booleans and nothing of names, paths and passwords, and cut them at a #.
    """
    if text.startswith(("[", "{")):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(text)
    return text


_WORDS_BY_TYPE = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "object": "a mapping of keys to values",
    "array": "a list",
}


def _convert(tree: dict[str, Any], options_type: type[Any], prefix: str) -> Any:
    try:
        return msgspec.convert(tree, options_type, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # a __post_init__ check: already says which field
            raise error.__cause__ from None
        what, _, path = str(error).rstrip("`").partition(" - at `$.")
        for name, words in _WORDS_BY_TYPE.items():
            what = what.replace(f"Expected `{name}`", words)
        what = what.partition(", got ")[0]
        value: Any = tree
        for part in path.split("."):
            value = value.get(part, value) if isinstance(value, dict) else value
        raise ConfigError(f"{prefix}{path}", value, what) from error


def _keys() -> list[str]:
    hints = typing.get_type_hints(Config)
    return [
        f"{section}.{leaf.name}"
        for section, options_type in hints.items()
        for leaf in dataclasses.fields(options_type)
        if f"{section}.{leaf.name}" != "connector.options"
    ]


def _check_variables(variables: Mapping[str, str]) -> None:
    """A variable that starts like a section's but is none of its keys is a mistake, as it is in the file."""
    known = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper() for key in _keys()}
    for section in typing.get_type_hints(Config):
        prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
        for variable in variables:
            if variable.startswith(prefix) and variable not in known:
                names = ", ".join(sorted(name for name in known if name.startswith(prefix)))
                raise ConfigError(variable, variables[variable], f"one of the variables {names}")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, leaf = key.partition(".")
    if key in MAPPING_KEYS:
        value = {**(tree.get(section, {}).get(leaf) or {}), **_pairs(key, value)}
    tree.setdefault(section, {})[leaf] = value


def _refuse_doubled_keys(root: yaml.Node | None) -> None:
    """YAML takes the last of several and says nothing. Raises yaml.YAMLError."""
    waiting, visited = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in visited:  # an alias, maybe of what it is in
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.MarkedYAMLError(None, None, f"the key {key.value} is there twice", key.start_mark)
                    seen.add(key.value)


def _pairs(key: str, items: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        _check(bool(name and equals and value), key, item, "NAME=PATH")
        pairs[name] = value
    return pairs


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        _refuse_doubled_keys(yaml.compose(text, yaml.SafeLoader))
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError("--config", str(path), f"a readable YAML file ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("--config", str(path), f"valid YAML ({' '.join(str(error).split())})") from error
    if loaded is None:
        return {}
    hints = typing.get_type_hints(Config)
    if not isinstance(loaded, dict):
        raise ConfigError("--config", str(path), "a mapping of sections")
    for section, leaves in loaded.items():
        if section not in hints:
            raise ConfigError(str(section), leaves, f"one of the sections {', '.join(hints)}")
        if not isinstance(leaves, dict):
            raise ConfigError(str(section), leaves, "a mapping of keys to values")
        known = [leaf.name for leaf in dataclasses.fields(hints[section])]
        for leaf, value in leaves.items():
            if leaf not in known:
                raise ConfigError(f"{section}.{leaf}", value, f"one of the keys {', '.join(known)}")
    return {section: dict(leaves) for section, leaves in loaded.items()}
