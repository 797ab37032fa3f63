"""Quantized checkpoints: packed here number by number as their formats say, read back through the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config import ModelOptions
from core.errors import ModelLoadError
from core.model.checkpoint_formats import FLOAT_CHECKPOINT, CheckpointFormat, read_checkpoint_format
from core.model.description import describe_model
from core.model.weight_reader import WeightReader
from tests.unit.core.model.support import Driver, random_prompt, save_llama

HOST = torch.device("cpu")
INPUTS, OUTPUTS, GROUP = 64, 48, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed_tensors(strategy: str, kind: str = "float", form: str = "float-quantized", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


def write_folder(folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def read_weight(folder: Path, shape: tuple[int, int] = (OUTPUTS, INPUTS)) -> Tensor:
    with WeightReader(folder, torch.float32, HOST) as reader:
        return reader.read("m.weight", shape)


def pack(numbers: list[int], bits: int) -> int:
    """A word of 32 bits as a signed number, the first number in its lowest bits."""
    word = sum(number << (bits * place) for place, number in enumerate(numbers))
    return word - 2**32 if word >= 2**31 else word


def quantize(weight: Tensor, group_of_input: list[int], bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers [outputs, inputs], zero points [groups, outputs], float16 scales [groups, outputs])."""
    num_groups, highest = max(group_of_input) + 1, 2**bits - 1
    scales, zeros = torch.zeros(num_groups, len(weight)), torch.zeros(num_groups, len(weight), dtype=torch.int64)
    for group in range(num_groups):
        part = weight[:, torch.tensor(group_of_input) == group]
        low, high = part.amin(1).clamp(max=0.0), part.amax(1).clamp(min=0.0)
        scales[group] = (high - low) / highest
        zeros[group] = (-low / scales[group]).round().clamp(1, highest)
    scales = scales.half()
    by_input = torch.tensor(group_of_input)
    numbers = (weight / scales.float()[by_input].t() + zeros[by_input].t()).round().clamp(0, highest).long()
    return numbers, zeros, scales


def oracle(numbers: Tensor, zeros: Tensor, scales: Tensor, group_of_input: list[int]) -> Tensor:
    rows = [
        [
            (int(numbers[output, i]) - int(zeros[group, output])) * float(scales[group, output])
            for i, group in enumerate(group_of_input)
        ]
        for output in range(len(numbers))
    ]
    return torch.tensor(rows)


def awq_tensors(weight: Tensor, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """A module's tensors by the end of their names, and what they mean."""
    outputs, inputs = weight.shape
    group_of_input = [i // group_size for i in range(inputs)]
    numbers, zeros, scales = quantize(weight, group_of_input, 4)

    def words(rows: Tensor) -> Tensor:  # of eight outputs: even ones in the low half, odd ones in the high half
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return torch.tensor(
            [[pack([row[first + place] for place in order], 4) for first in range(0, outputs, 8)] for row in rows.tolist()],
            dtype=torch.int32,
        )

    tensors = {"qweight": words(numbers.t()), "qzeros": words(zeros), "scales": scales}
    return tensors, oracle(numbers, zeros, scales, group_of_input)


def gptq_tensors(
    weight: Tensor, group_size: int, bits: int = 4, is_shuffled: bool = False, zero_offset: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs = weight.shape
    per_word = 32 // bits
    group_of_input = [i // group_size for i in range(inputs)]
    if is_shuffled:
        group_of_input = [group_of_input[i] for i in torch.randperm(inputs).tolist()]
    numbers, zeros, scales = quantize(weight, group_of_input, bits)
    by_output = numbers.tolist()
    qweight = [
        [pack(by_output[output][first : first + per_word], bits) for output in range(outputs)]
        for first in range(0, inputs, per_word)
    ]
    qzeros = [
        [pack([zero - zero_offset for zero in row[first : first + per_word]], bits) for first in range(0, outputs, per_word)]
        for row in zeros.tolist()
    ]
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": scales,
        "g_idx": torch.tensor(group_of_input, dtype=torch.int32),
    }
    return tensors, oracle(numbers, zeros, scales, group_of_input)


def fp8_tensors(
    weight: Tensor, scale: Tensor, name: str = "weight_scale", block: list[int] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """scale: in any shape that tiles the weight; block: [outputs, inputs] of a tile, where the last ones are not full."""
    outputs, inputs = weight.shape
    if scale.dim() == 2 and scale.numel() > 1:
        rows, columns = block or (outputs // scale.shape[0], inputs // scale.shape[1])
        each = torch.tensor([[float(scale[o // rows, i // columns]) for i in range(inputs)] for o in range(outputs)])
    else:
        each = torch.full((outputs, inputs), float(scale))
    numbers = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": numbers, name: scale}, numbers.float() * each


def module(tensors: Mapping[str, Tensor], name: str = "m") -> dict[str, Tensor]:
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(OUTPUTS, INPUTS)


def random_scale(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.05 + 0.01


@pytest.mark.parametrize(
    ("quantization", "scale_shape", "scale_name"),
    [
        (FP8, (), "weight_scale"),
        (FP8, (1,), "weight_scale"),
        ({**FP8, "weight_block_size": [16, 16]}, (3, 4), "weight_scale_inv"),
        ({**FP8, "weight_block_size": [20, 24]}, (3, 3), "weight_scale_inv"),  # the last blocks are not full
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (OUTPUTS, 1), "weight_scale"),
        (compressed_tensors("tensor"), (1,), "weight_scale"),
        (compressed_tensors("channel"), (OUTPUTS, 1), "weight_scale"),
        (compressed_tensors("group", group_size=GROUP), (OUTPUTS, INPUTS // GROUP), "weight_scale"),
        (compressed_tensors("block", block_structure=[16, 16]), (3, 4), "weight_scale"),
        (compressed_tensors("block", block_structure="16x16"), (3, 4), "weight_scale"),
    ],
)
def test_fp8_checkpoint_reads_numbers_times_scales(
    tmp_path: Path, weight: Tensor, quantization: dict[str, Any], scale_shape: tuple[int, ...], scale_name: str
) -> None:
    tensors, expected = fp8_tensors(weight, random_scale(*scale_shape), scale_name, quantization.get("weight_block_size"))
    tensors["input_scale"] = torch.tensor(1.0)  # of activations: nothing for us
    found = read_weight(write_folder(tmp_path / "m", module(tensors), quantization))
    assert torch.equal(found, expected)
    assert (found - weight).abs().max() < 0.4  # and that is near what was quantized


def test_int8_checkpoint_reads_numbers_times_scales(tmp_path: Path, weight: Tensor) -> None:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().to(torch.int8)
    quantization = compressed_tensors("channel", "int", "int-quantized")
    tensors = module({"weight": numbers, "weight_scale": scale})
    assert torch.equal(read_weight(write_folder(tmp_path / "m", tensors, quantization)), numbers.float() * scale)
    tensors["m.weight_zero_point"] = torch.zeros(OUTPUTS, 1, dtype=torch.int8)
    assert torch.equal(read_weight(write_folder(tmp_path / "m", tensors, quantization)), numbers.float() * scale)
    tensors["m.weight_zero_point"][3] = 1
    with pytest.raises(ModelLoadError, match="m: weights with zero points are not supported"):
        read_weight(write_folder(tmp_path / "m", tensors, quantization))


@pytest.mark.parametrize("group_size", [GROUP, INPUTS])
def test_awq_checkpoint_reads_what_was_packed(tmp_path: Path, weight: Tensor, group_size: int) -> None:
    tensors, expected = awq_tensors(weight, group_size)
    config = {**AWQ, "group_size": -1 if group_size == INPUTS else group_size}
    found = read_weight(write_folder(tmp_path / "m", module(tensors), config))
    assert torch.equal(found, expected)
    assert (found - weight).abs().max() < (weight.max() - weight.min()) / 15


@pytest.mark.parametrize(("bits", "is_shuffled", "stored"), [(4, False, "gptq"), (4, True, "gptq"), (8, True, "gptq_v2")])
def test_gptq_checkpoint_reads_what_was_packed(tmp_path: Path, weight: Tensor, bits: int, is_shuffled: bool, stored: str) -> None:
    tensors, expected = gptq_tensors(weight, GROUP, bits, is_shuffled, 1 if stored == "gptq" else 0)
    config = {**GPTQ, "bits": bits, "checkpoint_format": stored}
    assert torch.equal(read_weight(write_folder(tmp_path / "m", module(tensors), config)), expected)
    if not is_shuffled:
        del tensors["g_idx"]
        assert torch.equal(read_weight(write_folder(tmp_path / "m", module(tensors), config)), expected)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_quantized_llama_gives_the_tokens_of_its_dequantized_weights(tmp_path: Path, method: str) -> None:
    save_llama(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for name, tensor in list(plain.items()):
        if not any(f".{projection}." in name for projection in PROJECTIONS):
            quantized[name] = tensor
            continue
        if method == "awq":
            tensors, meant = awq_tensors(tensor, GROUP)
        elif method == "gptq":
            tensors, meant = gptq_tensors(tensor, GROUP, is_shuffled=True)
        else:
            tensors, meant = fp8_tensors(tensor, tensor.abs().amax() / 448.0)
        quantized |= module(tensors, name.removesuffix(".weight"))
        plain[name] = meant
    outputs, fingerprints = [], []
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for folder, held, quantization in (
        ("plain", plain, None),
        ("quantized", quantized, {"awq": AWQ, "gptq": GPTQ, "fp8": FP8}[method]),
    ):
        write_folder(tmp_path / folder, held, None)
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        (tmp_path / folder / "tokenizer.json").write_text("{}")
        driver = Driver(tmp_path / folder)
        outputs.append(driver.run_alone(driver.add("r", random_prompt(40, seed=1)), 12, chunk=16).output)
        fingerprints.append(driver.description.model_fingerprint)
    assert outputs[0] == outputs[1]
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported: fp8, fbgemm_fp8, ",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ([1], r"quantization_config is \[1\]; allowed: an object"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'.*supported: e4m3"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size \[128\].*supported: \[outputs, inputs\]"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size 0"),
        ({**AWQ, "bits": 3}, "bits 3.*4 for awq"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'.*supported: gemm"),
        ({**GPTQ, "bits": 3}, "bits 3.*4 or 8 for gptq"),
        ({**GPTQ, "group_size": "many"}, "group_size 'many'"),
        ({**GPTQ, "dynamic": {"x": {}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (compressed_tensors("channel", "int", "pack-quantized"), "format 'pack-quantized'.*supported: float-quantized"),
        (compressed_tensors("token"), "strategy 'token'"),
        (compressed_tensors("channel", num_bits=4), "weights of 8 bits"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "config_groups None"),
    ],
)
def test_checkpoint_format_not_supported_raises_naming_field_and_allowed(quantization: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_checkpoint_format({"quantization_config": quantization}, Path("model"))


def test_checkpoint_format_of_float_weights_is_nothing_to_undo() -> None:
    assert read_checkpoint_format({}, Path("model")) is FLOAT_CHECKPOINT
    assert read_checkpoint_format({"compression_config": compressed_tensors("channel")}, Path("m")) == CheckpointFormat(
        "scaled", "compressed-tensors"
    )


@pytest.mark.parametrize("quantization", [AWQ, GPTQ, FP8, compressed_tensors("channel")])
def test_quantization_config_over_plain_weights_raises_instead_of_serving_them(
    tmp_path: Path, weight: Tensor, quantization: dict[str, Any]
) -> None:
    folder = write_folder(tmp_path / "m", {"m.weight": weight}, quantization)
    with pytest.raises(ModelLoadError, match=f"quantization_config of {quantization['quant_method']}, but no tensor"):
        read_weight(folder)


def test_quantized_tensors_without_quantization_config_raise_saying_so(tmp_path: Path, weight: Tensor) -> None:
    folder = write_folder(tmp_path / "m", module(awq_tensors(weight, GROUP)[0]), None)
    with pytest.raises(ModelLoadError, match=r"missing tensor m\.weight \(but there is m\.qweight.*quantization_config"):
        read_weight(folder)


@pytest.mark.parametrize(
    ("method", "name", "replacement", "message"),
    [
        ("awq", "qweight", torch.zeros(3, 4, dtype=torch.int32), r"m\.qweight has shape \[3, 4\], expected \[64, 6\]"),
        ("awq", "qweight", torch.zeros(64, 6), r"m\.qweight has dtype torch\.float32, expected torch\.int32"),
        ("awq", "qzeros", torch.zeros(1, 6, dtype=torch.int32), r"m\.qzeros has shape \[1, 6\], expected \[4, 6\]"),
        ("awq", "scales", None, r"missing tensor m\.scales"),
        ("gptq", "qweight", torch.zeros(64, 6, dtype=torch.int32), r"m\.qweight has shape \[64, 6\], expected \[8, 48\]"),
        ("gptq", "g_idx", torch.full((64,), 4, dtype=torch.int32), r"m\.g_idx names groups 4 to 4, of 4"),
        ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32), r"m\.g_idx names groups -1"),
        ("fp8", "weight", torch.zeros(48, 64), r"m\.weight has dtype torch\.float32, expected torch\.float8_e4m3fn"),
        ("fp8", "weight_scale", torch.ones(7), r"m\.weight_scale has shape \[7\], expected \[\], \[1\] or \[48, 1\]"),
    ],
)
def test_quantized_tensors_that_do_not_fit_together_raise_naming_them(
    tmp_path: Path, weight: Tensor, method: str, name: str, replacement: Tensor | None, message: str
) -> None:
    makers = {"awq": lambda: awq_tensors(weight, GROUP), "gptq": lambda: gptq_tensors(weight, GROUP)}
    tensors = dict(makers.get(method, lambda: fp8_tensors(weight, random_scale(1)))()[0])
    del tensors[name]
    if replacement is not None:
        tensors[name] = replacement
    folder = write_folder(tmp_path / "m", module(tensors), {"awq": AWQ, "gptq": GPTQ, "fp8": FP8}[method])
    with pytest.raises(ModelLoadError, match=message):
        read_weight(folder)


def test_quantized_weight_whose_sizes_its_format_cannot_have_raises(tmp_path: Path, weight: Tensor) -> None:
    folder = write_folder(tmp_path / "m", module(awq_tensors(weight, GROUP)[0]), {**AWQ, "group_size": 48})
    with pytest.raises(ModelLoadError, match="m: 64 inputs are not in groups of 48"):
        read_weight(folder)
    with pytest.raises(ModelLoadError, match="m: 42 outputs do not fill words of 32 bits"):
        read_weight(write_folder(tmp_path / "m", module(awq_tensors(weight, GROUP)[0]), AWQ), (42, 64))


def test_describe_model_of_a_broken_quantization_config_raises_before_any_weight_is_read(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="quant_method 'hqq'"):
        describe_model(tmp_path, ModelOptions(), 16)
