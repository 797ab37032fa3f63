"""A real vLLM server in processes of its own, asked over HTTP. Used where vLLM is installed; see `make test-vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.model_files import SMOLLM2_ALIAS, resolve_model
from deploy.topology import find_free_ports
from tests.architecture.source_tree import ROOT

HOST = "127.0.0.1"
BLOCK_SIZE = 32
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0


class VllmServer:
    """Runs from construction to end(), which is safe to repeat. extra_config None: vLLM alone, without a connector.

    float32, so that the same prompt has the same greedy tokens whether its prefix was computed or loaded.
    """

    def __init__(self, folder: Path, extra_config: dict[str, Any] | None = None) -> None:
        (self.port,) = find_free_ports(HOST, 1)
        # What `vllm serve` runs; that command itself fails in the build for CPUs, which is not called vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve_model(SMOLLM2_ALIAS))]
        command += ["--host", HOST, "--port", str(self.port), "--served-model-name", "model", "--dtype", "float32"]
        command += ["--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK_SIZE)]
        if extra_config is not None:
            transfer = {
                "kv_connector": "KVRelayConnector",
                "kv_connector_module_path": "connectors.vllm_plugin",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra_config,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        # Development mode offers /reset_prefix_cache.
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        folder.mkdir(parents=True, exist_ok=True)
        # What it leaves goes with the folder; but the path of a socket must be short.
        settings |= {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": tempfile.gettempdir()}
        environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
        self.log_path = folder / f"vllm-{self.port}.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> VllmServer:
        """Until it answers; fails with its log if it ends before."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process.poll() is None, f"vLLM ended: {self.log_path.read_text()[-4000:]}"
            assert time.monotonic() < deadline_s, f"vLLM does not start: {self.log_path.read_text()[-4000:]}"
            try:
                self._fetch("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return self

    def complete(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy output tokens."""
        body = {"model": "model", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        (choice,) = json.loads(self._fetch("/v1/completions", {**body, "return_token_ids": True}))["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == num_tokens
        return list(choice["token_ids"])

    def num_external_hit_tokens(self) -> int:
        """By vLLM's own metrics, since its start."""
        found = re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", self._fetch("/metrics"), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def forget_local_prefixes(self) -> None:
        """Drop vLLM's own prefix cache, and nothing of the store."""
        self._fetch("/reset_prefix_cache", {})

    def num_failed_loads(self) -> int:
        """So far, by the plugin's log."""
        return self.log_path.read_text(errors="replace").count("did not arrive and are computed")

    def _fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        """kill -9 of all its processes."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM, which lets saves on their way arrive; SIGKILL if that is not enough. Safe to repeat.

        Its workers outlive the first process by seconds, and remove their shared memory at the very end.
        """
        self._signal(signal.SIGTERM, only_first=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
        self.kill()

    def _signal(self, number: int, only_first: bool = False) -> None:
        try:
            (os.kill if only_first else os.killpg)(self._process.pid, number)
        except ProcessLookupError:
            return
        if not only_first:
            self._process.wait()
