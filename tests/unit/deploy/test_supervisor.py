"""The supervisor with small stand-in children: starting, restarting, ending in order, and leaving nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.child_process import ChildSpec
from deploy.supervisor import ClusterStartError, RestartBackoff, StopRequestedError, Supervisor

DEADLINE_S = 20.0
WELL_BEHAVED = """
import pathlib, signal, sys, time
def end(*_):
    with open(sys.argv[1] + ".ended", "a") as log:
        log.write(f"{time.monotonic()}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("started", flush=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
STUBBORN = WELL_BEHAVED.replace("signal.signal(signal.SIGTERM, end)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def spec(name: str, script: str, folder: Path) -> ChildSpec:
    return ChildSpec(name=name, argv=(sys.executable, "-c", script, str(folder / name)))


def missing_of(folder: Path, *names: str) -> Callable[[], str]:
    return lambda: ", ".join(name for name in names if not (folder / name).exists())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S} s for: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_restart_backoff_quick_deaths_restarts_thrice_at_once_then_doubles_up_to_thirty_seconds() -> None:
    backoff = RestartBackoff()
    assert [backoff.next_delay_s(lifetime_s=0.5) for _ in range(10)] == [0, 0, 0, 1, 2, 4, 8, 16, 30, 30]


def test_restart_backoff_after_a_long_life_starts_again() -> None:
    backoff = RestartBackoff()
    for _ in range(4):
        backoff.next_delay_s(lifetime_s=0.5)
    assert [backoff.next_delay_s(lifetime_s) for lifetime_s in (3600.0, 0.5, 0.5, 0.5)] == [0, 0, 0, 1]


def test_supervisor_output_is_prefixed_per_child(tmp_path: Path) -> None:
    out = io.StringIO()
    with Supervisor(stream=out) as supervisor:
        supervisor.start([spec("router", WELL_BEHAVED, tmp_path)], missing_of(tmp_path, "router"), DEADLINE_S)
    assert "router  | started\n" in out.getvalue()
    assert "\x1b[" not in out.getvalue()  # no terminal, no colours


def test_supervisor_leaving_ends_first_child_before_the_others(tmp_path: Path) -> None:
    names = ["router", "prefill-0", "decode-0"]
    with Supervisor(stream=io.StringIO()) as supervisor:
        supervisor.start([spec(name, WELL_BEHAVED, tmp_path) for name in names], missing_of(tmp_path, *names), DEADLINE_S)
        pids = [child.pid for child in supervisor.running]
        assert len(pids) == 3
    ended_s = [float((tmp_path / f"{name}.ended").read_text()) for name in names]
    assert ended_s[0] <= min(ended_s[1:])
    assert not any(is_alive(pid) for pid in pids)


def test_supervisor_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    out = io.StringIO()
    with Supervisor(grace_s=0.4, stream=out) as supervisor:
        supervisor.start([spec("router", STUBBORN, tmp_path)], missing_of(tmp_path, "router"), DEADLINE_S)
        pid = supervisor.running[0].pid
    assert not is_alive(pid)
    assert "killed" in out.getvalue()


def test_supervisor_child_dies_while_starting_raises_with_its_last_lines(tmp_path: Path) -> None:
    failing = "import sys; print('weights.bin: no such file', file=sys.stderr); sys.exit(3)"
    with Supervisor(stream=io.StringIO()) as supervisor:
        with pytest.raises(ClusterStartError, match=r"(?s)decode-0 ended with exit code 3 .*weights.bin: no such file"):
            supervisor.start(
                [spec("router", WELL_BEHAVED, tmp_path), spec("decode-0", failing, tmp_path)], lambda: "decode-0", DEADLINE_S
            )
        pids = [child.pid for child in supervisor.running]
        assert len(pids) == 1
    assert not is_alive(pids[0])


def test_supervisor_never_ready_raises_and_says_what_is_missing(tmp_path: Path) -> None:
    with Supervisor(stream=io.StringIO()) as supervisor, pytest.raises(ClusterStartError, match="decode-0 is loading"):
        supervisor.start([spec("router", WELL_BEHAVED, tmp_path)], lambda: "decode-0 is loading", timeout_s=0.3)


def test_supervisor_signal_while_starting_stops(tmp_path: Path) -> None:
    with Supervisor(stream=io.StringIO()) as supervisor:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(StopRequestedError):
            supervisor.start([spec("router", WELL_BEHAVED, tmp_path)], lambda: "never", DEADLINE_S)


def test_supervisor_child_dies_while_serving_is_started_again(tmp_path: Path) -> None:
    out = io.StringIO()
    with Supervisor(stream=out) as supervisor:
        supervisor.start([spec("decode-0", WELL_BEHAVED, tmp_path)], missing_of(tmp_path, "decode-0"), DEADLINE_S)
        victim = supervisor.running[0].pid

        def kill_and_wait() -> None:
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: any(child.pid != victim for child in supervisor.running), "a new child")
            os.kill(os.getpid(), signal.SIGINT)

        killer = threading.Thread(target=kill_and_wait)
        killer.start()
        supervisor.watch()  # returns on the SIGINT above
        killer.join(DEADLINE_S)
        successor = supervisor.running[0].pid
        assert successor != victim
    assert "ended by SIGKILL; starting it again at once" in out.getvalue()
    assert not is_alive(successor)


def test_supervisor_second_signal_kills_at_once(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with Supervisor(grace_s=60.0, stream=io.StringIO()) as supervisor:
        supervisor.start([spec("router", STUBBORN, tmp_path)], missing_of(tmp_path, "router"), DEADLINE_S)
        pid = supervisor.running[0].pid
        for delay_s in (0.1, 0.6):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        supervisor.watch()
    assert not is_alive(pid)
    assert time.monotonic() - began_s < DEADLINE_S


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_supervisor_killed_leaves_no_orphans(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from deploy.child_process import ChildSpec
from deploy.supervisor import Supervisor
mark = sys.argv[1]
with Supervisor() as supervisor:
    spec = ChildSpec(name="decode-0", argv=(sys.executable, "-c", {WELL_BEHAVED!r}, mark))
    supervisor.start([spec], lambda: "" if Path(mark).exists() else "mark", 20)
    print(supervisor.running[0].pid, flush=True)
    supervisor.watch()
"""
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "mark")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child_pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait(DEADLINE_S)
    wait_until(lambda: not is_alive(child_pid), "the orphan to end")
