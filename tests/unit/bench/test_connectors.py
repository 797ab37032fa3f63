"""The benchmark of connectors: what it needs and does not find, it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.media.nvme import create_medium


def test_nvme_medium_without_fio_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install fio"):
        create_medium(tmp_path, 4096)
