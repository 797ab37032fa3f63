"""Folders of adapters that hold something else than two plain files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from core import adapter_files
from core.adapter_files import CONFIG_FILE, MAX_WEIGHTS_BYTES, WEIGHTS_FILE, read_adapter
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


def test_read_adapter_the_same_identity_with_and_without_its_weights_however_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / WEIGHTS_FILE).write_bytes(bytes(range(256)) * 3)
    whole = read_adapter(str(folder))
    monkeypatch.setattr(adapter_files, "_CHUNK_BYTES", 100)
    assert read_adapter(str(folder)) == whole and whole.weights == bytes(range(256)) * 3
    without = read_adapter(str(folder), keeps_weights=False)
    assert (without.fingerprint, without.weights) == (whole.fingerprint, b"")
    (folder / WEIGHTS_FILE).write_bytes(bytes(range(256)) * 3 + b"x")
    assert read_adapter(str(folder)).fingerprint != whole.fingerprint


def test_read_adapter_file_beyond_the_limit_is_refused_unread(folder: Path) -> None:
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.truncate(MAX_WEIGHTS_BYTES + 1)  # sparse: takes no room
    with pytest.raises(InvalidInputError, match="at most"):
        read_adapter(str(folder))
