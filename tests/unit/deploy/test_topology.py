"""What `kvrelay serve` runs: the effective configuration, the processes, and the ports."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path

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
    user_cache_dir,
)
from core.errors import ConfigError
from deploy.topology import (
    child_specs,
    choose_ports,
    connect_host,
    effective_config,
    join_host_port,
    with_connector_defaults,
    with_default_folder,
)

MODEL_FOLDER = Path("/models/converted-1a2b")


def effective(config: Config, num_cores: int = 8) -> Config:
    return effective_config(config, MODEL_FOLDER, num_cores)


def test_effective_config_cores_are_divided_among_nodes() -> None:
    assert effective(Config(), num_cores=8).engine.num_threads == 4
    assert effective(Config(cluster=ClusterOptions(prefill=3, decode=4)), num_cores=2).engine.num_threads == 1
    assert effective(Config(cluster=ClusterOptions(prefill=0, decode=1)), num_cores=2).engine.num_threads == 2
    assert effective(Config(engine=EngineOptions(tensor_parallel_size=2)), num_cores=8).engine.num_threads == 2


def test_effective_config_users_threads_stay() -> None:
    assert effective(Config(engine=EngineOptions(num_threads=7))).engine.num_threads == 7


def test_connector_defaults_users_options_stay() -> None:
    config = Config(connector=ConnectorOptions(options={"name": "mine", "capacity_bytes": 4}))
    assert with_connector_defaults(config).connector.options == {"name": "mine", "capacity_bytes": 4}


def test_connector_defaults_pool_of_another_cluster_is_not_shared() -> None:
    names = [with_connector_defaults(Config(router=RouterOptions(port=port))).connector.options["name"] for port in (8000, 9000)]
    assert names == ["serve-8000", "serve-9000"]
    assert Config().connector.options == {}  # the default of the next cluster is untouched


def test_connector_defaults_store_on_disk_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", "/cache")
    assert with_connector_defaults(Config(connector=ConnectorOptions(name="nvme"))).connector.options == {"path": "/cache/kv"}


def test_connector_defaults_another_store_gets_none() -> None:
    assert with_connector_defaults(Config(connector=ConnectorOptions(name="theirs"))).connector.options == {}


def test_effective_config_model_is_the_folder_under_its_alias(tmp_path: Path) -> None:
    assert effective(Config()).model.path == str(MODEL_FOLDER)
    assert effective(Config()).model.served_name == "smollm2"
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert effective(Config(model=ModelOptions(path=str(folder)))).model.served_name == "my-model"
    assert effective(Config(model=ModelOptions(path=str(folder), served_name="x"))).model.served_name == "x"


def test_effective_config_nodes_find_the_router() -> None:
    assert effective(Config()).node.router == "127.0.0.1:8001"
    assert effective(Config(router=RouterOptions(host="0.0.0.0", port=9000, control_port=9500))).node.router == "127.0.0.1:9500"
    assert effective(Config(router=RouterOptions(control_host="::1"))).node.router == "[::1]:8001"
    keys = SecurityOptions(keys="/keys")
    assert effective(Config(router=RouterOptions(control_host="0.0.0.0"), security=keys)).node.router == "127.0.0.1:8001"
    assert effective(Config(router=RouterOptions(control_host="10.1.2.3"), security=keys)).node.router == "10.1.2.3:8001"


def test_effective_config_paths_mean_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = effective(Config(router=RouterOptions(api_keys_file="api.yaml"), security=SecurityOptions(keys="keys")))
    assert (config.router.api_keys_file, config.security.keys) == (str(tmp_path / "api.yaml"), str(tmp_path / "keys"))
    assert (effective(Config()).router.api_keys_file, effective(Config()).security.keys) == ("", "")


def test_child_specs_router_is_first_and_names_are_unique() -> None:
    specs = child_specs(Config(cluster=ClusterOptions(prefill=2, decode=1)), Path("/tmp/c.yaml"), 7)
    assert [spec.name for spec in specs] == ["router", "prefill-0", "prefill-1", "decode-0"]
    for spec, module in zip(specs, ["router", "prefill_node", "prefill_node", "decode_node"], strict=True):
        assert spec.argv[spec.argv.index("-m") + 1] == module
        assert spec.argv[spec.argv.index("--config") + 1] == "/tmp/c.yaml"
    assert specs[3].argv[specs[3].argv.index("--node-id") + 1] == "decode-0"
    assert specs[0].inherited_fds == (7,) and specs[0].argv[-2:] == ("--router.http_fd", "7")


def test_child_specs_given_metrics_port_is_counted_up() -> None:
    specs = child_specs(Config(node=NodeOptions(metrics_port=9300)), Path("c.yaml"), 7)
    assert [spec.argv[-1] for spec in specs[1:]] == ["9300", "9301"]


def test_connect_host_any_address_is_loopback() -> None:
    assert [connect_host(host) for host in ("0.0.0.0", "::", "127.0.0.1", "host.local")] == [
        "127.0.0.1",
        "::1",
        "127.0.0.1",
        "host.local",
    ]
    assert join_host_port("::1", 8000) == "[::1]:8000"


def test_choose_ports_zero_finds_free_ones() -> None:
    router = choose_ports(Config(router=RouterOptions(port=0))).router
    assert router.port > 0
    assert router.control_port > 0
    assert router.port != router.control_port


def test_choose_ports_taken_port_names_the_flag() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port: got {port}; allowed: a port that is free on 127\.0\.0\.1"):
            choose_ports(Config(router=RouterOptions(port=port)))
        with pytest.raises(ConfigError, match="--control-port"):
            choose_ports(Config(router=RouterOptions(port=0, control_port=port)))


def test_choose_ports_host_that_is_not_ours_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--host"):
        choose_ports(Config(router=RouterOptions(host="not a host name")))


def test_choose_ports_control_host_that_is_not_ours_names_its_flag() -> None:
    config = Config(router=RouterOptions(port=0, control_host="not a host name"), security=SecurityOptions(keys="/keys"))
    with pytest.raises(ConfigError, match="--control-host"):
        choose_ports(config)


def test_choose_ports_both_equal_is_refused() -> None:
    router = dataclasses.replace(RouterOptions(), port=8123, control_port=8123)
    with pytest.raises(ConfigError, match=r"router\.control_port"):
        choose_ports(Config(router=router))


def test_connector_defaults_tiers_get_those_of_their_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", "/cache")
    options = {"tiers": "shm,cold,redis", "cold": {"connector": "nvme"}, "shm.capacity_bytes": 7, "write": "back"}
    assert with_connector_defaults(Config(connector=ConnectorOptions(name="tiered", options=options))).connector.options == {
        "tiers": "shm,cold,redis",
        "shm": {"name": "serve-8000"},
        "shm.capacity_bytes": 7,
        "cold": {"path": "/cache/kv", "connector": "nvme"},
        "redis": {},
        "write": "back",
    }


def test_default_folder_of_cache_is_that_of_serve_in_tiers_too() -> None:
    for connector in (ConnectorOptions(name="nvme"), ConnectorOptions(name="tiered", options={"tiers": "shm,nvme"})):
        of_serve, of_cache = (
            with_connector_defaults(Config(connector=connector)),
            with_default_folder(Config(connector=connector)),
        )
        options = [config.connector.options for config in (of_serve, of_cache)]
        where = [found["path"] if connector.name == "nvme" else found["nvme"]["path"] for found in options]
        assert where[0] == where[1] == str(user_cache_dir() / "kv")


def cpus_of_nodes(config: Config, cores: Sequence[int]) -> list[str | None]:
    specs = child_specs(effective(config, len(cores)), Path("c.yaml"), 7, cores)[1:]
    return [spec.argv[spec.argv.index("--cpus") + 1] if "--cpus" in spec.argv else None for spec in specs]


def test_child_specs_every_node_has_cores_of_its_own() -> None:
    assert cpus_of_nodes(Config(), [0, 1]) == ["0", "1"]
    assert cpus_of_nodes(Config(cluster=ClusterOptions(prefill=1, decode=2)), [0, 1, 2, 3, 8, 9, 10]) == ["0-1", "2-3", "8-9"]
    assert cpus_of_nodes(Config(cluster=ClusterOptions(prefill=0, decode=1)), [4, 5]) == ["4-5"]


def test_child_specs_too_few_cores_are_everybodys() -> None:
    assert cpus_of_nodes(Config(cluster=ClusterOptions(prefill=1, decode=2)), [0, 1]) == [None, None, None]
    assert cpus_of_nodes(Config(engine=EngineOptions(num_threads=2)), [0, 1]) == [None, None]
