"""Mapped weights: whose memory they are, and what is said of folders that are not whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ModelLoadError
from core.model.weight_reader import WeightReader
from core.model_files import hash_weight_files, list_weight_files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HOST = torch.device("cpu")


def reader_of(folder: Path, dtype: torch.dtype = torch.float32) -> WeightReader:
    return WeightReader(folder, dtype, HOST)


def write_shards(folder: Path, *shards: Mapping[str, Tensor], index: Mapping[str, str] | None = None) -> list[str]:
    """Shards with an index of what they hold, unless another is given."""
    names = [f"model-{number}.safetensors" for number in range(len(shards))]
    held = {}
    for name, tensors in zip(names, shards, strict=True):
        save_file(dict(tensors), folder / name)
        held.update(dict.fromkeys(tensors, name))
    (folder / INDEX).write_text(json.dumps({"weight_map": held if index is None else index}))
    return names


def mapped_file(tensor: Tensor) -> str:
    """The file in which a tensor's first byte lies, by /proc/self/maps; empty for memory of no file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, _inode = (fields := line.split(maxsplit=5))[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return fields[5] if len(fields) > 5 else ""
    raise AssertionError("no mapping holds the tensor")


def test_reader_tensor_as_stored_lies_in_the_mapped_file_after_the_reader_is_closed(tmp_path: Path) -> None:
    values = torch.randn(300, 64)
    names = write_shards(tmp_path, {"a.weight": values}, {"b.weight": values.bfloat16()})
    with reader_of(tmp_path) as reader:
        shared, cast = reader.read("a.weight", (300, 64)), reader.read("b.weight", (300, 64))
    assert mapped_file(shared) == str(tmp_path / names[0])
    assert str(tmp_path) not in mapped_file(cast)  # in another dtype than is served: this process's own
    assert torch.equal(shared, values) and torch.equal(cast, values.bfloat16().float())
    with reader_of(tmp_path) as again:  # as a second node would: another mapping of the same pages
        assert mapped_file(again.read("a.weight", (300, 64))) == mapped_file(shared)


def test_reader_stacks_parts_and_leaves_a_single_one_mapped(tmp_path: Path) -> None:
    parts = {f"m.{name}.weight": torch.randn(4, 8) for name in "qk"}
    save_file(parts, tmp_path / SINGLE)
    with reader_of(tmp_path) as reader:
        stacked = reader.read_stacked("m", [("q", 4), ("k", 4)], 8)
        single = reader.read_stacked("m", [("k", 4)], 8)
    assert torch.equal(stacked, torch.cat(list(parts.values())))
    assert torch.equal(single, parts["m.k.weight"]) and mapped_file(single) == str(tmp_path / SINGLE)


def test_reader_index_decides_which_shard_has_a_tensor(tmp_path: Path) -> None:
    first, second = torch.zeros(2), torch.ones(2)
    names = [f"model-{number}.safetensors" for number in range(2)]
    write_shards(tmp_path, {"x": first}, {"x": second}, index={"x": names[1]})
    with reader_of(tmp_path) as reader:
        assert torch.equal(reader.read("x", (2,)), second)


def test_reader_without_index_refuses_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"x": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"tensor x in several files; allowed: once, or model\.safetensors\.index\.json"):
        reader_of(tmp_path)


def test_reader_index_naming_absent_tensors_raises_naming_shard_and_tensor(tmp_path: Path) -> None:
    name = "model-0.safetensors"
    write_shards(tmp_path, {"x": torch.zeros(2)}, index={"x": name, "y": name})
    with pytest.raises(ModelLoadError, match=rf"{name}: lacks tensor y, which .*index\.json says it holds"):
        reader_of(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ('{"weight_map": []}', "not a safetensors index"),
        ('{"weight_map": {"x": {}}}', "not a safetensors index"),
        ('{"weight_map": {"x": 3}}', "not a safetensors index|names 3"),
        ('{"weight_map": {"x": "../other.safetensors"}}', r"names '\.\./other\.safetensors'; allowed: names of files"),
        ('{"weight_map": {"x": "model-7.safetensors"}}', r"missing model-7\.safetensors, named by"),
        ("[" * 100_000, "not a safetensors index"),
    ],
)
def test_reader_broken_index_raises_saying_what(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        reader_of(tmp_path)


def test_reader_dangling_links_raise_saying_where_they_lead(tmp_path: Path) -> None:
    names = write_shards(tmp_path, {"x": torch.zeros(2)})
    (tmp_path / names[0]).unlink()
    (tmp_path / names[0]).symlink_to("../blobs/gone")
    with pytest.raises(
        ModelLoadError, match=r"model-0\.safetensors \(a link to \.\./blobs/gone, which does not exist\), named by"
    ):
        reader_of(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelLoadError, match=r"missing model-0\.safetensors \(a link to"):
        list_weight_files(tmp_path)
    (tmp_path / SINGLE).symlink_to("gone")
    with pytest.raises(ModelLoadError, match=r"missing model\.safetensors \(a link to gone"):
        list_weight_files(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / INDEX).symlink_to("gone.json")
    with pytest.raises(ModelLoadError, match=r"index\.json \(a link to gone\.json"):
        list_weight_files(tmp_path)


def test_reader_file_cut_at_any_length_raises_naming_it(tmp_path: Path) -> None:
    save_file({"x.weight": torch.randn(64, 8), "y": torch.randn(100)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    for length in (0, 4, 8, 60, len(whole) // 2, len(whole) - 1):
        (tmp_path / SINGLE).write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a readable safetensors file"):
            reader_of(tmp_path)
    for first in (b"\xff" * 8, (2**40).to_bytes(8, "little")):  # a header longer than the file
        (tmp_path / SINGLE).write_bytes(first + whole[8:])
        with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
            reader_of(tmp_path)


def test_reader_file_that_cannot_be_read_raises_naming_it(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").mkdir()  # opens for nobody, not even an administrator
    with pytest.raises(ModelLoadError, match=r"weights\.safetensors: not a readable safetensors file"):
        reader_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"weights\.safetensors: cannot be read"):
        hash_weight_files(list_weight_files(tmp_path))
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors: cannot be read \(No such file"):
        hash_weight_files([tmp_path / "gone.safetensors"])


def test_reader_wrong_shape_dtype_or_name_raises_naming_the_tensor(tmp_path: Path) -> None:
    save_file(
        {"x": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int8), "f.weight": torch.zeros(2).to(torch.float8_e4m3fn)},
        tmp_path / SINGLE,
    )
    with reader_of(tmp_path) as reader:
        with pytest.raises(ModelLoadError, match=r"tensor x has shape \[2, 3\], expected \[3, 2\]"):
            reader.read("x", (3, 2))
        with pytest.raises(ModelLoadError, match=r"tensor n has dtype torch\.int8, expected a floating one"):
            reader.read("n", (2,))
        with pytest.raises(ModelLoadError, match=r"f\.weight has dtype torch\.float8_e4m3fn.*lacks the quantization_config"):
            reader.read("f.weight", (2,))
        with pytest.raises(ModelLoadError, match="missing tensor z"):
            reader.read("z", (2,))
