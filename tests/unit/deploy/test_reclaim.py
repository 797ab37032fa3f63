"""What a killed `kvrelay serve` leaves is removed by the next one, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.reclaim import folder_prefix, reclaim_folders


def test_reclaim_folders_of_dead_processes_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / f"kvrelay-serve-{ended.pid}-abcd"
    alive = Path(tempfile.mkdtemp(prefix=folder_prefix()))
    foreign = tmp_path / "kvrelay-serve-notes"
    for folder in (dead, foreign):
        folder.mkdir()
    (dead / "config.yaml").write_text("model: {}")
    assert str(os.getpid()) in alive.name
    reclaim_folders()
    assert not dead.exists() and alive.exists() and foreign.exists()
