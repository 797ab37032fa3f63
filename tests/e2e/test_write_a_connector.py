"""docs/write-a-connector.md, carried out step by step: a third party's package, installed, tested and served with."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serve_process import ROOT, ServeProcess

FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TUTORIAL = ROOT / "docs" / "write-a-connector.md"
# As pip does in an environment that has kvrelay, but into a folder of the test.
INSTALL = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target")


@pytest.mark.timeout(600)
def test_tutorial_every_step_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, installed = tmp_path / "kvrelay-sqlite", tmp_path / "installed"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(installed), str(ROOT))))
    fences = FENCE.findall(TUTORIAL.read_text())
    files = {name: text for language, name, text in fences if language in ("toml", "python")}
    assert set(files) == {"pyproject.toml", "kvrelay_sqlite.py", "test_contract.py"}
    assert len([line for line in files["kvrelay_sqlite.py"].splitlines() if line.strip()]) <= 60
    for name, text in files.items():
        (package / name).write_text(text)
    outputs = []
    for line in "".join(text for language, name, text in fences if (language, name) == ("console", "")).splitlines():
        program, *arguments = shlex.split(line)
        if program == "pip":
            assert arguments == ["install", "."]
            command = [sys.executable, *INSTALL, str(installed), "."]
        else:
            assert program == "pytest"
            command = [sys.executable, "-m", "pytest", "-q", *arguments]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        outputs.append(done.stdout)
    num_passed = [int(found.group(1)) for output in outputs if (found := re.search(r"(\d+) passed", output))]
    assert len(num_passed) == 2
    assert num_passed[1] > num_passed[0] > 50  # with the harness of its own, damage is tried as well

    (command_line,) = [text.strip() for language, name, text in fences if (language, name) == ("console", "serve")]
    program, command_name, *flags = shlex.split(command_line)
    assert (program, command_name) == ("kvrelay", "serve")
    monkeypatch.chdir(tmp_path)
    flags += ["--engine.kv_load_policy", "always"]  # so short a prompt is computed as fast
    serve = ServeProcess(tmp_path, *(flag.replace("path=kv.db", f"path={tmp_path / 'kv.db'}") for flag in flags))
    try:
        serve.wait_ready()
        prompt = "one two three " * 40
        first = serve.client.complete(prompt, max_tokens=4)["choices"][0]["text"]
        hits = "kvrelay_external_prefix_cache_hits_total"  # as of the node's latest heartbeat
        serve.wait_until(lambda: serve.client.metric(hits, role="decode") > 0, "the decode node has loaded KV")
        assert serve.client.complete(prompt, max_tokens=4)["choices"][0]["text"] == first
    finally:
        serve.close()
