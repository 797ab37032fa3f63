"""`kvrelay serve`: a router and its nodes on this machine, from the model's folder to the last clean-up.

What runs is decided in topology.py, how it is kept running in supervisor.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import Config, config_to_yaml
from core.cores import usable_cores
from core.model_files import resolve_model
from core.wire.curve import NODE, ROUTER, load_keys
from deploy.child_process import ChildSpec
from deploy.reclaim import folder_prefix, reclaim_folders
from deploy.router_client import RouterUnreachableError, get_json, nodes_up
from deploy.supervisor import ClusterStartError, StopRequestedError, Supervisor
from deploy.topology import (
    child_specs,
    choose_ports,
    connect_host,
    effective_config,
    join_host_port,
    node_names,
    open_http_listener,
    with_connector_defaults,
)
from router.api_key_file import read_api_keys

START_TIMEOUT_S = 900.0  # a large model on a slow disk; a child that fails ends the wait at once


def serve(config: Config) -> int:
    """Run the cluster until Ctrl-C or SIGTERM. Returns the exit code. Raises KVRelayError before anything is started."""
    config = with_connector_defaults(choose_ports(config))
    create_connector(config.connector.name, config.connector.options, MonotonicClock())  # only looks at its options
    check_keys(config)
    config = effective_config(config, resolve_model(config.model.path), len(usable_cores()))
    url = f"http://{join_host_port(connect_host(config.router.host), config.router.port)}"
    # The folder goes before the children do: they read it only when they start, and it shall go even if ending them fails.
    reclaim_folders()
    with (
        open_http_listener(config) as listener,
        Supervisor() as supervisor,
        tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder,
    ):
        config_file = Path(folder) / "config.yaml"
        config_file.write_text(config_to_yaml(config))
        specs = child_specs(config, config_file, listener.fileno(), usable_cores())
        return _run(supervisor, specs, config, config_file, url)


def _run(supervisor: Supervisor, specs: list[ChildSpec], config: Config, config_file: Path, url: str) -> int:
    """Start, greet, watch; the children still run when this returns."""
    began_s = time.monotonic()
    try:
        supervisor.start(specs, lambda: describe_missing(url, config), START_TIMEOUT_S)
    except ClusterStartError as error:
        supervisor.say(str(error))
        return 1
    except StopRequestedError:
        return 0
    nodes = f"{config.cluster.prefill} prefill and {config.cluster.decode} decode nodes, store {config.connector.name}"
    supervisor.say(f"ready after {time.monotonic() - began_s:.0f} s: a router, {nodes}")
    print(greeting(url, config, config_file), flush=True)
    supervisor.watch()
    return 0


def check_keys(config: Config) -> None:
    """Raise ConfigError for key files that router or nodes would refuse: better one line now than a failure of a child later."""
    for role in (ROUTER, NODE):
        load_keys(config.security.keys, role)
    if config.router.api_keys_file:
        read_api_keys(Path(config.router.api_keys_file))


def describe_missing(url: str, config: Config) -> str:
    """What the cluster still lacks, in words; "" once /health says 200 and every node is registered and up."""
    try:
        up = nodes_up(url, timeout_s=2.0)
        health, _ = get_json(url, "/health", timeout_s=2.0)
    except RouterUnreachableError:
        return "the router is starting, the nodes are loading the model"
    if missing := [name for name in node_names(config) if name not in up]:
        return f"the router is up, {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} loading the model"
    return "" if health == 200 else "all nodes are there, the router is not healthy yet"


def greeting(url: str, config: Config, config_file: Path) -> str:
    """What to try first: a curl line and a snippet for the official OpenAI client."""
    model = config.model.served_name
    interpreter = Path(sys.executable).name
    has_keys = bool(config.router.api_keys_file)
    header, key = (" -H 'Authorization: Bearer YOUR-KEY'", "YOUR-KEY") if has_keys else ("", "unused")
    return f"""
kvrelay serves {model} at {url}. Try it:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}], "max_tokens": 32, "temperature": 0}}'

or, with the official client ({interpreter} -m pip install openai):

  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  chat = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Say hello."}}], stream=True, max_tokens=32, temperature=0
  )
  for chunk in chat:
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Another node may join at any time: kvrelay decode-node --config {config_file}
Ctrl-C ends everything.
"""
