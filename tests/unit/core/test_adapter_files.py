"""Folders of adapters that hold something else than two plain files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from core.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from core.errors import InvalidInputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    (tmp_path / WEIGHTS_FILE).write_bytes(b"weights")
    return tmp_path


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize(
    "put", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, Path.mkdir], ids=["endless", "fifo", "folder"]
)
@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(folder: Path, name: str, put: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    put(folder / name)
    with pytest.raises(InvalidInputError, match=rf"{name}'; allowed: a (regular file|file that can be read)"):
        read_adapter(str(folder))


def test_symlink_to_a_regular_file_is_followed(folder: Path) -> None:
    expected = read_adapter(str(folder))
    (folder / WEIGHTS_FILE).rename(folder / "blob")
    (folder / WEIGHTS_FILE).symlink_to("blob")
    assert read_adapter(str(folder)) == expected


def test_configuration_nested_too_deeply_is_refused(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("[" * 200_000)
    with pytest.raises(InvalidInputError, match="allowed: JSON"):
        read_adapter(str(folder))
