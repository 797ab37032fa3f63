"""Pools in memory: how processes find them, what is left of them, and members that are stopped, killed, damaged or strangers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.contract.peer import Peer
from connectors.slots.available_memory import available_bytes
from connectors.slots.memory_pool import MemoryLease, PoolDescriptors, is_memory_lease_alive
from connectors.slots.pool_members import ANSWER_TIMEOUT_S, MAX_MEMBERS, PoolMember, find_pool, joining
from connectors.slots.shm import create_connector
from core.kv.connector import TransferOutcome
from tests.support.memory_pools import give_up_pools, pool_files, pool_holders

OPTIONS = {"capacity_bytes": "2MiB"}
RECOVERY_HANG_S = 15.0  # three times what is promised, for a machine with other work


class Pool:
    """A pool of a test's own, and its members here and in other processes."""

    def __init__(self, name: str) -> None:
        self.options: dict[str, Any] = {"name": name, **OPTIONS}
        self.name = name
        self.nodes: list[Node] = []
        self.peers: list[Peer] = []

    def open_node(self) -> Node:
        clock = SteppedClock()
        self.nodes.append(Node(create_connector(self.options, clock), clock))
        return self.nodes[-1]

    def open_peer(self) -> Peer:
        self.peers.append(Peer("shm", self.options))
        assert self.peers[-1].ask("ready")
        return self.peers[-1]

    def close(self) -> None:
        for peer in self.peers:
            peer.kill()
        for node in self.nodes:
            node.connector.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    opened = Pool("-".join(tmp_path.parts[-2:])[-60:])
    yield opened
    opened.close()
    assert pool_holders(opened.name) == []


def stop(peer: Peer) -> None:
    os.kill(peer.pid, signal.SIGSTOP)
    wait_until(lambda: all(") T" in path.read_text() for path in Path(f"/proc/{peer.pid}/task").glob("*/stat")))


def resume(peer: Peer) -> None:
    os.kill(peer.pid, signal.SIGCONT)


def test_pool_outlives_the_process_that_made_it_and_whoever_joined_next(pool: Pool) -> None:
    maker, second, third = pool.open_peer(), pool.open_peer(), pool.open_peer()
    assert maker.ask("save", seed=1, num_blocks=8) == [8, "ok"]
    for leaving, left in ((maker, second), (second, third)):
        leaving.kill()
        assert left.ask("load", seed=1, num_blocks=8) == [8, "ok"]
        assert pool.open_node().load(chain(1, 8)).num_blocks_ok == 8
        pool.nodes.pop().connector.close()


def test_pool_of_a_stopped_maker_is_joined_through_another_member(pool: Pool) -> None:
    maker, second = pool.open_peer(), pool.open_peer()
    maker.ask("save", seed=1, num_blocks=8)
    stop(maker)
    assert pool.open_node().load(chain(1, 8)).num_blocks_ok == 8
    assert second.ask("save", seed=2, num_blocks=8) == [8, "ok"]
    resume(maker)
    assert maker.ask("load", seed=2, num_blocks=8) == [8, "ok"]


def test_pool_whose_only_member_is_stopped_is_done_without_and_joined_once_it_goes_on(pool: Pool) -> None:
    maker = pool.open_peer()
    maker.ask("save", seed=1, num_blocks=8)
    stop(maker)
    node = pool.open_node()
    assert node.lookup(chain(1, 8)) == 0
    assert node.save(chain(2, 8)).outcome is TransferOutcome.ERROR
    resume(maker)
    started_s = time.monotonic()
    wait_until(lambda: node.load(chain(1, 8)).num_blocks_ok == 8)
    print(f"used after {time.monotonic() - started_s:.2f} s")
    assert time.monotonic() - started_s < RECOVERY_HANG_S
    assert len(pool_files(pool.name, "index")) == 1


def test_pool_of_a_member_stopped_while_it_writes_serves_the_others(pool: Pool) -> None:
    node, peer = pool.open_node(), pool.open_peer()
    node.save(chain(0, 8))
    for attempt in range(4):
        peer.send("save_for_ever", first_seed=100 * attempt + 1)
        peer.answer()
        stop(peer)
        assert node.lookup(chain(0, 8)) == 8
        node.load(chain(0, 8))  # compared byte by byte
        assert node.save(chain(0, 8)).outcome in (TransferOutcome.OK, TransferOutcome.ERROR)  # it may hold the lock
        peer.kill()
        assert node.save(chain(1000 + attempt, 8)).outcome is TransferOutcome.OK
        peer = pool.open_peer()


def test_pool_of_members_that_start_at_once_is_one(pool: Pool) -> None:
    for round_number in range(3):
        with ThreadPoolExecutor(6) as executor:
            nodes = [future.result() for future in [executor.submit(pool.open_node) for _ in range(6)]]
        assert len(pool_files(pool.name, "index")) == 1
        nodes[0].save(chain(round_number, 8))
        assert [node.load(chain(round_number, 8)).num_blocks_ok for node in nodes] == [8] * 6
        for node in nodes:
            node.connector.close()
        assert pool_holders(pool.name) == []


def test_pool_given_up_by_one_is_left_by_idle_members_too(pool: Pool) -> None:
    busy, idle, peer = pool.open_node(), pool.open_node(), pool.open_peer()
    busy.save(chain(1, 8))
    give_up_pools(pool.name)
    wait_until(lambda: busy.save(chain(2, 8)).outcome is TransferOutcome.OK)
    assert pool.open_node().lookup(chain(2, 8)) == 8
    for user in (idle, busy):
        user.load(chain(3, 1))
        assert user.load(chain(2, 8)).num_blocks_ok == 8
    peer.ask("load", seed=3, num_blocks=1)
    assert peer.ask("load", seed=2, num_blocks=8) == [8, "ok"]


def test_pool_with_a_damaged_index_is_not_joined_but_replaced_for_all(pool: Pool) -> None:
    first = pool.open_node()
    first.save(chain(1, 8))
    with pool_files(pool.name, "index")[0].open("r+b") as file:
        file.write(b"\xff" * 40)
    second = pool.open_node()
    assert second.save(chain(2, 8)).outcome is TransferOutcome.OK
    first.load(chain(1, 8))
    assert first.load(chain(2, 8)).num_blocks_ok == 8


def test_pool_full_of_members_declines_the_next_until_one_leaves(pool: Pool) -> None:
    descriptors = PoolDescriptors.create(f"full-{pool.name}", LAYOUT, 4)
    members = [PoolMember(f"full-{pool.name}", (descriptors.index,), lambda: True) for _ in range(MAX_MEMBERS)]
    with pytest.raises(OSError, match=f"{MAX_MEMBERS} members"):
        PoolMember(f"full-{pool.name}", (descriptors.index,), lambda: True)
    members.pop().close()
    members.append(PoolMember(f"full-{pool.name}", (descriptors.index,), lambda: True))
    for member in members:
        member.close()
    descriptors.close()


def test_find_pool_while_members_are_silent_gives_up_in_time(pool: Pool) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{pool.name}-3")
        silent.listen(0)
        for _ in range(3):  # until its backlog is full, too
            started_s = time.monotonic()
            with pytest.raises(TimeoutError, match="answers within"):
                find_pool(pool.name, 1)
            assert time.monotonic() - started_s < 20 * ANSWER_TIMEOUT_S
    assert find_pool(pool.name, 1) == []


def test_find_pool_whose_member_fails_to_answer_does_not_take_it_for_gone(pool: Pool) -> None:
    def fail() -> bool:
        raise OSError("no descriptor is free")

    descriptors = PoolDescriptors.create(pool.name, LAYOUT, 4)
    for given, is_usable in (((descriptors.index,), lambda: True), ((descriptors.index, descriptors.slots), fail)):
        member = PoolMember(pool.name, given, is_usable)
        with pytest.raises(TimeoutError):
            find_pool(pool.name, 2)
        member.close()
        assert find_pool(pool.name, 2) == []
    descriptors.close()


def test_find_pool_given_up_by_all_its_members_finds_nothing(pool: Pool) -> None:
    descriptors = PoolDescriptors.create(pool.name, LAYOUT, 4)
    member = PoolMember(pool.name, (descriptors.index, descriptors.slots), lambda: False)
    assert find_pool(pool.name, 2) == []
    member.close()
    descriptors.close()


def test_joining_while_another_joins_waits_and_then_gives_up(pool: Pool) -> None:
    with joining(pool.name), pytest.raises(TimeoutError, match="joining"), joining(pool.name, timeout_s=0.05):
        pass
    with joining(pool.name, timeout_s=0.0):
        pass


def test_memory_lease_is_alive_until_released_whoever_asks() -> None:
    descriptors = PoolDescriptors.create("lease-test", LAYOUT, 4)
    lease = MemoryLease(descriptors.index, 7)
    assert is_memory_lease_alive(descriptors.index, 7) and not is_memory_lease_alive(descriptors.index, 8)
    with pytest.raises(OSError):
        MemoryLease(descriptors.index, 7)
    lease.release()
    lease.release()
    assert not is_memory_lease_alive(descriptors.index, 7)
    descriptors.close()
    descriptors.close()


def test_pool_memory_cannot_change_its_size() -> None:
    descriptors = PoolDescriptors.create("seal-test", LAYOUT, 4)
    for descriptor in (descriptors.index, descriptors.slots):
        for num_bytes in (0, 2**30):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, num_bytes)
    descriptors.close()


MACHINE = "MemFree: 1 kB\nMemAvailable:  100 kB\n"
V2, V1 = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MACHINE}, 100 * 1024),
        ({"proc/meminfo": MACHINE, f"group/{V2[0]}": "max\n", f"group/{V2[1]}": "5\n"}, 100 * 1024),
        ({f"group/{V2[0]}": "1000", f"group/{V2[1]}": "700", "group/memory.stat": "anon 5\ninactive_file 50\n"}, 350),
        ({f"group/a/{V2[0]}": "900", f"group/a/{V2[1]}": "700", f"group/{V2[0]}": "800", f"group/{V2[1]}": "750"}, 50),
        ({f"group/{V1[0]}": "90", f"group/{V1[1]}": "70"}, 20),
    ],
)
def test_available_bytes_are_the_least_of_machine_and_groups(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in {"proc/self/cgroup": "3:cpu,memory:/x\n4:memory:/a/b\n0::/a/b\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path / "proc", tmp_path / "group") == expected


def test_available_bytes_of_this_machine_are_some() -> None:
    found = available_bytes()
    assert found is None or found > 0


def test_member_that_nobody_listens_to_any_more_says_nothing_and_answers_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks for a pool asks all its members, and needs one answer."""
    name = f"kvrelay-test-{os.getpid()}"
    member = PoolMember(name, [0], lambda: True)
    try:
        for _ in range(50):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
                asker.connect(f"\0{name}-0")
        found = find_pool(name, 1)
        assert len(found or ()) == 1
        os.close(*(found or ()))
    finally:
        member.close()
    assert not caplog.records
