"""A node that cannot start says why in one line, and leaves no shared memory behind for the next one to find."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.e2e.prompts import MODEL
from tests.support.memory_pools import pool_holders

POOL_NAME = "failed-start"


def _start_and_fail(*flags: str) -> str:
    """The last line of a decode node that must not start."""
    command = [sys.executable, "-m", "decode_node", "--model", MODEL, "--dtype", "bfloat16", "--engine.num_threads", "1"]
    options = ("--connector-option", f"name={POOL_NAME}", "--connector-option", "capacity_bytes=64MiB")
    ended = subprocess.run([*command, *options, *flags], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert pool_holders(POOL_NAME) == []
    return ended.stderr.splitlines()[-1]


@pytest.mark.timeout(150)
def test_node_with_a_pool_too_small_for_its_model_ends_and_leaves_nothing() -> None:
    assert "engine.num_blocks" in _start_and_fail("--engine.kv_pool_mib", "64")


@pytest.mark.timeout(150)
def test_node_whose_metrics_port_is_taken_ends_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = _start_and_fail("--engine.kv_pool_mib", "192", "--metrics-port", str(port))
    assert f"node.metrics_port: got {port}" in line
