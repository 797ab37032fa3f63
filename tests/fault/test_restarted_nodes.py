"""A node that comes back under its own name and port at once, and one whose name a second process takes over."""

from __future__ import annotations

import urllib.request

import pytest

from deploy.topology import find_free_ports
from tests.fault.rig import Rig
from tests.support.cluster import HOST


def _metrics_of(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_node_killed_mid_load_and_restarted_on_its_port_requests_before_and_after_are_right(rig: Rig, name: str) -> None:
    (port,) = find_free_ports(HOST, 1)
    rig.cluster.kill(name)
    rig.cluster.restart_node(name, "--metrics-port", str(port))
    generation = rig.node(name)["generation"]
    first = rig.start(f"first of {name}")
    rig.wait_busy(name)
    assert f'node_id="{name}"' in _metrics_of(port)
    rig.cluster.kill(name)
    rig.cluster.restart_node(name, "--metrics-port", str(port), wait=False)
    rig.cluster.wait_until(lambda: rig.node(name)["generation"] != generation, "the new process is there")
    rig.wait_status(name, "up")
    assert f'node_id="{name}"' in _metrics_of(port)
    rig.check_right([*first, *rig.start(f"second of {name}", rig.questions[:4])])
    rig.cluster.wait_clean()


@pytest.mark.timeout(300)
def test_node_whose_name_a_second_process_takes_over_ends_and_says_why(rig: Rig) -> None:
    records = rig.start("taken over")
    rig.cluster.wait_until(lambda: rig.node("decode-0")["num_in_flight"] >= 2, "decode-0 has requests", timeout_s=60.0)
    old = rig.cluster.children.pop("decode-0")
    rig.cluster.restart_node("decode-0", wait=False)
    try:
        assert old.wait(60.0), "the old process went on"
        assert old.poll_exit_code() == 1
        assert any("was taken over by a newer process" in line for line in old.tail)
    finally:
        old.kill_group()
    rig.check_right(records)
    rig.wait_status("decode-0", "up")
    rig.cluster.wait_clean()
