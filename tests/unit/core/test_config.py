"""The configuration tree: which source wins, what is refused and in which words, and that YAML reads back unchanged."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.config import (
    ClusterOptions,
    Config,
    ConnectorOptions,
    EngineOptions,
    ModelOptions,
    NodeOptions,
    RouterOptions,
    SecurityOptions,
    add_config_flags,
    config_to_yaml,
    load_config,
    options_from_mapping,
    router_api_key,
    user_cache_dir,
)
from core.errors import ConfigError

SECTIONS = ("model", "engine", "connector", "router", "node", "cluster", "security")


def parse(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser, SECTIONS)
    return vars(parser.parse_args(list(flags)))


def load(*flags: str, environment: dict[str, str] | None = None) -> Config:
    return load_config(parse(*flags), environment or {})


def write(folder: Path, text: str) -> str:
    path = folder / "kvrelay.yaml"
    path.write_text(text)
    return str(path)


def test_config_nothing_given_is_the_defaults() -> None:
    assert load() == Config()


def test_config_file_wins_over_defaults(tmp_path: Path) -> None:
    config = load("--config", write(tmp_path, "router: {port: 9000}\nengine: {block_size: 32}\n"))
    assert (config.router.port, config.engine.block_size) == (9000, 32)
    assert config.router.host == RouterOptions().host


def test_config_environment_wins_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "router: {port: 9000, host: 0.0.0.0}\n")
    config = load("--config", path, environment={"KVRELAY_ROUTER_PORT": "9100"})
    assert (config.router.port, config.router.host) == (9100, "0.0.0.0")


def test_config_flags_win_over_environment_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, "router: {port: 9000}\n")
    config = load("--config", path, "--port", "9200", environment={"KVRELAY_ROUTER_PORT": "9100"})
    assert config.router.port == 9200


def test_config_short_and_long_flags_mean_the_same() -> None:
    assert load("--num-blocks", "77") == load("--engine.num_blocks", "77")
    assert load("--engine.num_blocks", "77").engine.num_blocks == 77


def test_config_values_from_text_get_their_types() -> None:
    config = load(
        "--engine.enable_prefix_caching",
        "false",
        "--engine.kv_load_timeout_s",
        "2.5",
        environment={"KVRELAY_CLUSTER_DECODE": "3"},
    )
    assert config.engine.enable_prefix_caching is False
    assert config.engine.kv_load_timeout_s == 2.5
    assert config.cluster.decode == 3


def test_config_connector_options_join_file_and_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "connector: {name: nvme, options: {folder: /data, capacity_mib: 10}}\n")
    config = load("--config", path, "--connector-option", "capacity_mib=20", "--connector-option", "label=a=b")
    assert config.connector.name == "nvme"
    assert config.connector.options == {"folder": "/data", "capacity_mib": "20", "label": "a=b"}


@pytest.mark.parametrize("text", ["", "123", "007", "1e5", "yes", "null", "a #b", "a: b", "*a", "[a", "{", "&", "2024-01-01"])
def test_config_text_option_on_the_command_line_is_taken_as_it_is(text: str) -> None:
    config = load("--connector-option", f"folder={text}", "--connector-option", "capacity_mib=20")
    options = options_from_mapping(StoreOptions, config.connector.options, prefix="connector.options")
    assert options == StoreOptions(capacity_mib=20, folder=text)


def test_config_option_in_brackets_is_a_list() -> None:
    assert load("--connector-option", "tiers=[shm, nvme]").connector.options == {"tiers": ["shm", "nvme"]}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("engine: {block_size: 8, block_size: 16}", "block_size"),
        ("engine: {}\nconnector: {}\nengine: {}", "engine"),
        ("connector: {options: {path: /a, nested: {x: 1, x: 2}}}", "x"),
    ],
)
def test_config_key_that_is_twice_in_the_file_is_refused(tmp_path: Path, content: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"the key {key} is there twice"):
        load("--config", write(tmp_path, content))


@pytest.mark.parametrize("flags", [[], ["--connector-option", "path=/a"]])
def test_config_options_that_are_no_mapping_are_refused_by_name(tmp_path: Path, flags: list[str]) -> None:
    path = write(tmp_path, "connector: {options: [a]}")
    with pytest.raises(ConfigError, match=r"connector\.options: got \['a'\]; allowed: a mapping of keys to values"):
        load("--config", path, *flags)


def test_config_lora_modules_join_file_environment_and_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "router: {lora_modules: {a: /a, b: /b}}\n")
    flags = ("--config", path, "--lora-modules", "b=/new", "c=/c=1", "--router.lora_modules", "d=/d")
    expected = {"a": "/a", "b": "/new", "c": "/c=1", "d": "/d"}
    assert load(*flags).router.lora_modules == expected
    assert load("--config", path, environment={"KVRELAY_ROUTER_LORA_MODULES": "x=/x,b=/y"}).router.lora_modules == {
        "a": "/a",
        "b": "/y",
        "x": "/x",
    }
    for wrong in ("no-path", "=/a", "a="):
        with pytest.raises(ConfigError, match=r"router\.lora_modules: got '.*'; allowed: NAME=PATH"):
            load("--lora-modules", wrong)


def test_config_to_yaml_reads_back_unchanged(tmp_path: Path) -> None:
    config = Config(
        model=ModelOptions(path="/models/a b", dtype="float32"),
        engine=EngineOptions(num_blocks=9, enable_chunked_prefill=False, lookup_timeout_s=0.25),
        connector=ConnectorOptions(name="shm", options={"name": "serve-1", "capacity_mib": 64, "is_strict": True}),
        router=RouterOptions(port=0, heartbeat_timeout_s=9.5),
        node=NodeOptions(router="[::1]:9", metrics_port=-1),
        cluster=ClusterOptions(prefill=0, decode=4),
    )
    assert load("--config", write(tmp_path, config_to_yaml(config))) == config


def test_config_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().router.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "field", "value", "allowed"),
    [
        (["--port", "70000"], "router.port", 70000, "0 to 65535"),
        (["--tool-call-parser", "xml"], "router.tool_call_parser", "xml", "hermes, llama3_json, mistral"),
        (["--dtype", "int4"], "model.dtype", "int4", "bfloat16 or float16 or float32"),
        (["--kv-cache-dtype", "int4"], "model.kv_cache_dtype", "int4", "auto or bfloat16 or float16 or float32 or fp8 or int8"),
        (["--quantization", "fp8"], "model.quantization", "fp8", "none or int8 or int4"),
        (["--quantization", "int4", "--dtype", "float32"], "model.quantization", "int4", "none or int8 with model.dtype float32"),
        (["--model", ""], "model.path", "", "an alias or a folder"),
        (["--max-model-len", "-1"], "model.max_model_len", -1, "0 (the model's own) or more"),
        (["--decode", "0"], "cluster.decode", 0, "1 or more"),
        (["--prefill", "-1"], "cluster.prefill", -1, "0 or more"),
        (["--block-size", "0"], "engine.block_size", 0, "1 or more"),
        (["--engine.policy", "random"], "engine.policy", "random", "fcfs or priority"),
        (["--engine.device", "cuda:a"], "engine.device", "cuda:a", "cpu, cuda or cuda:N"),
        (["--engine.priority_aging_s", "-1"], "engine.priority_aging_s", -1.0, "0 (off) or more"),
        (["--engine.scheduler_delay_factor", "inf"], "engine.scheduler_delay_factor", float("inf"), "0 (off) or more"),
        (["--engine.max_long_partial_prefills", "1"], "engine.max_long_partial_prefills", 1, "0 without"),
        (["--engine.kv_load_timeout_s", "0"], "engine.kv_load_timeout_s", 0.0, "above 0"),
        (["--max-num-batched-tokens", "4"], "engine.max_num_batched_tokens", 4, "at least engine.max_num_seqs (128)"),
        (["--router", "8001"], "node.router", "8001", "HOST:PORT"),
        (["--router.heartbeat_timeout_s", "0.6"], "router.heartbeat_timeout_s", 0.6, "at least twice"),
        (["--connector-option", "name"], "--connector-option", "name", "KEY=VALUE"),
    ],
)
def test_config_value_out_of_range_names_field_value_and_allowed(
    flags: list[str], field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    assert caught.value.field == field
    assert caught.value.value == value
    assert allowed in caught.value.allowed
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("router: {port: eight}", "router.port", "eight"),
        ("engine: {enable_prefix_caching: maybe}", "engine.enable_prefix_caching", "maybe"),
        ("router: {prot: 8000}", "router.prot", 8000),
        ("routre: {port: 8000}", "routre", {"port": 8000}),
        ("router: 8000", "router", 8000),
    ],
)
def test_config_file_with_a_wrong_line_names_it(tmp_path: Path, text: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--config", write(tmp_path, text))
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "router: {port: [\n", "just text"])
def test_config_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--config"):
        load("--config", write(tmp_path, text))


def test_config_file_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable YAML file"):
        load("--config", str(tmp_path / "none.yaml"))


def test_config_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load("--config", write(tmp_path, "")) == Config()


def test_config_environment_value_out_of_range_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"router\.port"):
        load(environment={"KVRELAY_ROUTER_PORT": "-5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    capacity_mib: int = 16
    folder: str = ""


@dataclass(frozen=True)
class NoOptions:
    pass


def test_connector_options_known_names_are_converted() -> None:
    options = options_from_mapping(StoreOptions, {"capacity_mib": "64"}, prefix="connector.options")
    assert options == StoreOptions(capacity_mib=64)


def test_connector_options_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"connector\.options\.capacity: got 64; allowed: .*capacity_mib, folder"):
        options_from_mapping(StoreOptions, {"capacity": 64}, prefix="connector.options")


def test_connector_options_of_a_connector_without_any_say_so() -> None:
    with pytest.raises(ConfigError, match=r"connector\.options\.x: got 1; allowed: nothing: there are no options"):
        options_from_mapping(NoOptions, {"x": 1}, prefix="connector.options")


def test_connector_options_wrong_type_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"connector\.options\.capacity_mib: got 'many'"):
        options_from_mapping(StoreOptions, {"capacity_mib": "many"}, prefix="connector.options")


def test_user_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVRELAY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "kvrelay"
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "own"))
    assert user_cache_dir() == tmp_path / "own"


def test_config_variable_with_a_typo_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"KVRELAY_ENGINE_BLOK_SIZE: got '32'; allowed: .*KVRELAY_ENGINE_BLOCK_SIZE"):
        load(environment={"KVRELAY_ENGINE_BLOK_SIZE": "32"})
    assert load(environment={"KVRELAY_CACHE_DIR": "/x", "HOME": "/y"}) == Config(), "not of a section: none of our business"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"engine: [1", b"a: b: c", b"[" * 5000])
def test_config_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--config: got .*valid YAML") as caught:
        load("--config", str(path))
    assert "\n" not in str(caught.value)


def test_config_null_connector_options_take_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "connector: {name: shm, options: null}\n")
    assert load("--config", path, "--connector-option", "name=x").connector.options == {"name": "x"}


def test_config_wrong_type_says_what_is_allowed_in_words() -> None:
    with pytest.raises(ConfigError, match=r"^router\.port: got 'abc'; allowed: a whole number$"):
        load("--port", "abc")


BEYOND_LOOPBACK = [
    "0.0.0.0",
    "::",
    "*",
    "192.0.2.7",
    "10.0.0.1",
    "fd00::2",
    "::ffff:192.0.2.7",
    "node7.example",
    "eth0",
    "",
    "127.1",
]


@pytest.mark.parametrize("host", BEYOND_LOOPBACK)
def test_config_control_host_beyond_loopback_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^router\.control_host: got .*security\.keys.*`kvrelay keys DIR`"):
        load("--control-host", host)
    assert load("--control-host", host, "--keys", "/keys").router.control_host == host


@pytest.mark.parametrize("host", [host for host in BEYOND_LOOPBACK if host])
def test_config_node_whose_router_is_beyond_loopback_without_keys_is_refused(host: str) -> None:
    address = f"[{host}]:8001" if ":" in host else f"{host}:8001"
    with pytest.raises(ConfigError, match=r"^node\.router: got .*security\.keys.*`kvrelay keys DIR`"):
        load("--router", address)
    assert load("--router", address, environment={"KVRELAY_SECURITY_KEYS": "/keys"}).node.router == address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LocalHost", "::ffff:127.0.0.1"])
def test_config_loopback_needs_no_keys(host: str) -> None:
    assert load("--control-host", host).security == SecurityOptions(keys="")
    assert load("--router", f"[{host}]:8001" if ":" in host else f"{host}:8001").security.keys == ""


def test_config_http_beyond_loopback_leaves_the_control_socket_where_it_is() -> None:
    config = load("--host", "0.0.0.0")
    assert (config.router.host, config.router.control_host) == ("0.0.0.0", "127.0.0.1")


def test_router_api_key_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    assert router_api_key() == ""
    monkeypatch.setenv("KVRELAY_API_KEY", " kvr-secret\n")
    assert router_api_key() == "kvr-secret"
    assert load_config({}, {"KVRELAY_API_KEY": "kvr-secret"}) == Config()
    monkeypatch.setenv("KVRELAY_API_KEY", "kvr-secret\nX-Other: 1")
    with pytest.raises(ConfigError, match="KVRELAY_API_KEY") as caught:
        router_api_key()
    assert "secret" not in str(caught.value)
