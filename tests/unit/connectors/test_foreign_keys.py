"""Names of another engine's blocks: whatever changes a block's content or the meaning of its bytes changes its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from connectors.vllm.foreign_keys import AdapterFingerprints, RankLayout, fingerprint_of_model, fingerprint_of_name
from core.errors import ConfigError
from core.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, block_size=32, num_kv_heads=3, head_dim=64, dtype="float32")
CONFIG = {"hidden_size": 64, "rope_theta": 1e4, "_name_or_path": "/here", "transformers_version": "5"}


def write_model(folder: Path, content: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_rank_layout_any_difference_is_another_namespace() -> None:
    rank = RankLayout(LAYOUT, "vllm=1|tp=0/2")
    others = [
        replace(rank, details="vllm=1|tp=1/2"),
        replace(rank, details="vllm=2|tp=0/2"),
        replace(rank, layout=replace(LAYOUT, dtype="bfloat16")),
        replace(rank, layout=replace(LAYOUT, block_size=64)),
    ]
    roots = {layout.namespace(b"model").root_hash() for layout in [rank, *others]}
    roots |= {rank.namespace(b"other").root_hash(), rank.namespace(b"model").root_hash("salt")}
    roots |= {rank.namespace(b"model").root_hash("", b"adapter")}
    assert len(roots) == len(others) + 4
    assert LAYOUT.fingerprint not in {layout.fingerprint for layout in [rank, *others]}


def test_model_fingerprint_is_of_content_not_of_place(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    first = fingerprint_of_model(here, CONFIG, "dtype=1")
    assert fingerprint_of_model(there, {**CONFIG, "_name_or_path": "/there", "transformers_version": "6"}, "dtype=1") == first
    assert fingerprint_of_model(here, {**CONFIG, "rope_theta": 1e6}, "dtype=1") != first
    assert fingerprint_of_model(here, CONFIG, "dtype=2") != first
    assert fingerprint_of_model(write_model(tmp_path / "b", b"other"), CONFIG, "dtype=1") != first


@pytest.mark.parametrize("model", ["org/name-on-a-hub", "."])
def test_model_fingerprint_without_local_weights_says_what_is_missing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model_fingerprint"):
        fingerprint_of_model(model, CONFIG, "")
    assert fingerprint_of_name("v1", "") != fingerprint_of_name("v2", "")


def test_adapter_fingerprint_is_of_content_and_none_where_it_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        write_model(tmp_path / name, content)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    adapters = AdapterFingerprints()
    first, same, other = (adapters.find(name, str(tmp_path / name)) for name in "abc")
    assert first == same and None not in (first, other) and first != other
    assert adapters.find("d", str(tmp_path / "d")) is None
    assert adapters.find("hub", "org/adapter") is None
