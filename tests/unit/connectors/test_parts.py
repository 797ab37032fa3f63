"""Leases and directory locks, chains of prefixes, and the worker threads on their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from connectors.contract.node import HANG_S, SteppedClock, wait_until
from connectors.file_lock import Lease, has_live_lease, is_lease_alive, lock_descriptor, locked_directory, remove_if_empty
from connectors.prefix_chains import PrefixChains
from connectors.transfer_workers import TransferWorkers
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult


def test_lease_of_a_killed_process_is_dead(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, connectors.file_lock as f; l = f.Lease(pathlib.Path(sys.argv[1]), 7); print(1, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None and process.stdout.readline()
    assert is_lease_alive(tmp_path, 7) and has_live_lease(tmp_path)
    process.kill()
    process.communicate()
    assert not is_lease_alive(tmp_path, 7)
    assert not has_live_lease(tmp_path) and list(tmp_path.iterdir()) == []


def test_lease_released_twice_is_gone_once(tmp_path: Path) -> None:
    lease = Lease(tmp_path, 1)
    assert is_lease_alive(tmp_path, 1)
    lease.release()
    successor = Lease(tmp_path, 1)
    lease.release()
    assert is_lease_alive(tmp_path, 1)
    successor.release()
    assert list(tmp_path.iterdir()) == []


def test_lease_of_a_removed_directory_spares_its_successor(tmp_path: Path) -> None:
    lease = Lease(tmp_path, 1)
    (tmp_path / "lease-1").unlink()
    successor = Lease(tmp_path, 1)
    lease.release()
    assert is_lease_alive(tmp_path, 1)
    successor.release()


def test_lock_held_by_another_raises_a_timeout(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open("w") as second:
        lock_descriptor(first.fileno())
        with pytest.raises(TimeoutError):
            lock_descriptor(second.fileno(), timeout_s=0.05)


@pytest.mark.parametrize("path", ["dangling", "dangling/below", "file/below"])
def test_locked_directory_that_can_never_be_raises(tmp_path: Path, path: str) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "not-mounted" / "disk")
    (tmp_path / "file").touch()
    with pytest.raises(OSError), locked_directory(tmp_path / path):
        pass


def test_locked_directory_removed_by_its_holder_is_made_anew_for_the_next(tmp_path: Path) -> None:
    root = tmp_path / "root"
    num_inside = most_inside = num_done = 0
    mutex = threading.Lock()

    def join_and_leave() -> None:
        nonlocal num_inside, most_inside, num_done
        for _ in range(20):
            with locked_directory(root, timeout_s=HANG_S):
                with mutex:
                    num_inside += 1
                    most_inside = max(most_inside, num_inside)
                assert root.is_dir()
                with mutex:
                    num_inside -= 1
                    num_done += 1
                remove_if_empty(root)

    threads = [threading.Thread(target=join_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert (num_done, most_inside) == (80, 1)
    assert not root.exists()


def test_prefix_chains_name_the_ancestors_of_a_transfer() -> None:
    chains = PrefixChains()
    names = [bytes([number]) * 16 for number in range(6)]
    chains.note_lookup("request", names[:4])
    assert chains.note_transfer("request", names[2:4]) == names[:2]
    assert chains.note_transfer("request", names[4:]) == names[:4]
    assert chains.note_transfer("request", names[5:]) == names[:5]
    assert chains.note_transfer("stranger", names[1:2]) == []
    assert chains.note_transfer("request", []) == []


def test_prefix_chains_forget_the_oldest_requests() -> None:
    chains = PrefixChains(max_chains=3)
    for number in range(100):
        chains.note_lookup(f"request {number}", [b"a" * 16, bytes([number]) * 16])
    assert len(chains._chain_by_request) <= 6
    assert chains.note_transfer("request 99", [bytes([99]) * 16]) == [b"a" * 16]
    assert chains.note_transfer("request 1", [bytes([1]) * 16]) == []
    assert len(chains._chain_by_request) <= 4


def transfer(number: int) -> Transfer:
    """Any transfer."""
    return Transfer(number, TransferDirection.LOAD, "request", (), (), SteppedClock().now_s() + HANG_S)


def test_workers_whose_work_raises_report_an_error_and_live_on() -> None:
    def execute(transfer: Transfer) -> TransferResult:
        if transfer.transfer_id == 1:
            raise RuntimeError("a bug")
        return TransferResult(transfer.transfer_id, 0, TransferOutcome.OK)

    workers = TransferWorkers(execute, lambda: False, lambda: None, SteppedClock())
    workers.start_threads(1, "test")
    workers.start(transfer(1))
    workers.start(transfer(2))
    found: list[TransferResult] = []
    wait_until(lambda: found.extend(workers.poll()) or len(found) == 2)
    assert [result.outcome for result in found] == [TransferOutcome.ERROR, TransferOutcome.OK]
    assert workers.close()


def test_workers_run_jobs_of_several_transfers_without_waiting_for_each_other() -> None:
    workers: TransferWorkers
    done: list[int] = []

    def execute(transfer: Transfer) -> TransferResult:
        workers.run_jobs([lambda: done.append(transfer.transfer_id) for _ in range(20)])
        return TransferResult(transfer.transfer_id, done.count(transfer.transfer_id), TransferOutcome.OK)

    workers = TransferWorkers(execute, lambda: False, lambda: None, SteppedClock())
    workers.start_threads(3, "test")
    for number in range(12):
        workers.start(transfer(number))
    found: list[TransferResult] = []
    wait_until(lambda: found.extend(workers.poll()) or len(found) == 12)
    assert {result.num_blocks_ok for result in found} == {20}
    assert workers.close()


def test_workers_background_is_repeated_while_there_is_more() -> None:
    calls: list[int] = []
    workers = TransferWorkers(
        lambda transfer: TransferResult(0, 0, TransferOutcome.OK),
        lambda: calls.append(1) or len(calls) < 5,
        lambda: None,
        SteppedClock(),
    )
    workers.start_threads(2, "test")
    workers.request_background()
    wait_until(lambda: len(calls) >= 5)
    assert workers.close()
