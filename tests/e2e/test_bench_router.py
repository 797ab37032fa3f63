"""The router's bench against a real router process and fake nodes. Its figures are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("pace_ms", [0, 2])
def test_overhead_streams_come_whole_and_cpu_is_counted(pace_ms: int) -> None:
    command = [sys.executable, "-m", "bench.router", "overhead", "--json", "--requests=6", "--rounds=1", "--connections=2"]
    command += ["--nodes=2", "--prompt-tokens=40", "--output-tokens=7", f"--pace-ms={pace_ms}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["by_router"]["kvrelay"]["events_per_request"] == 8  # each token, and the end
    assert found["ours_over_theirs"] == {}


def test_overhead_unknown_router_is_refused() -> None:
    command = [sys.executable, "-m", "bench.router", "overhead", "--against", "nginx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "got nginx; allowed: vllm-router, sglang-router" in done.stderr
