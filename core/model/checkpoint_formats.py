"""What a config.json says of quantized weights, checked: which of the formats that dequantizers.py undoes, with its parameters.

Reads no tensor and needs no torch: a model can be described without its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError

SUPPORTED_METHODS = "fp8, fbgemm_fp8, compressed-tensors (float-quantized, int-quantized), awq, gptq"
_SCALED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """kind: float (nothing to undo), scaled (8-bit weights times scales), awq or gptq.

    bits: of one number. group_size: inputs that share a scale, 0: all of a row. block: [outputs, inputs] that share one, of
    scaled weights with scales in both directions, else (0, 0). zero_offset: what GPTQ's stored zero points lack.
    """

    kind: str
    method: str = ""
    bits: int = 8
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    zero_offset: int = 0


FLOAT_CHECKPOINT = CheckpointFormat("float")


def read_checkpoint_format(config: dict[str, Any], model_dir: Path) -> CheckpointFormat:
    """From a parsed config.json. Raises ModelLoadError naming what is not supported, and what is."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return FLOAT_CHECKPOINT
    if not isinstance(given, dict):
        raise ModelLoadError(f"{model_dir}: quantization_config is {given!r}; allowed: an object with quant_method")
    reader = _FormatReader(given, model_dir)
    method = given.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return reader.fp8(method)
    if method == "compressed-tensors":
        return reader.compressed_tensors()
    if method == "awq":
        return reader.awq()
    if method == "gptq":
        return reader.gptq()
    raise reader.refuse("quant_method", method, SUPPORTED_METHODS)


@dataclass(frozen=True, slots=True)
class _FormatReader:
    """One quantization_config being read."""

    given: dict[str, Any]
    model_dir: Path

    def refuse(self, field: str, value: object, allowed: str) -> ModelLoadError:
        """The exception to raise."""
        return ModelLoadError(f"{self.model_dir}: quantization_config.{field} {value!r} is not supported; supported: {allowed}")

    def fp8(self, method: str) -> CheckpointFormat:
        if (fmt := self.given.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise self.refuse("fmt", fmt, "e4m3")
        size = self.given.get("weight_block_size")
        return CheckpointFormat("scaled", method, block=self._block("weight_block_size", size) if size else (0, 0))

    def compressed_tensors(self) -> CheckpointFormat:
        groups = self.given.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self.refuse("config_groups", groups, "one group or more")
        formats = {self.given.get("format"), *(g.get("format") for g in groups.values() if isinstance(g, dict))} - {None}
        for name in formats or {None}:
            if name not in _SCALED_FORMATS:
                raise self.refuse("format", name, ", ".join(_SCALED_FORMATS))
        blocks, group_sizes = set(), set()
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict) or weights.get("num_bits") != 8:
                raise self.refuse(f"config_groups.{name}.weights", weights, "weights of 8 bits")
            strategy = weights.get("strategy")
            if strategy not in ("tensor", "channel", "group", "block"):
                raise self.refuse(f"config_groups.{name}.weights.strategy", strategy, "tensor, channel, group or block")
            if strategy == "block":
                blocks.add(self._block(f"config_groups.{name}.weights.block_structure", weights.get("block_structure")))
            if strategy == "group":
                group_sizes.add(self._positive(f"config_groups.{name}.weights.group_size", weights.get("group_size")))
        if len(blocks) + len(group_sizes) > 1:
            raise self.refuse("config_groups", sorted(groups), "groups that agree on what shares a scale")
        return CheckpointFormat(
            "scaled", "compressed-tensors", group_size=next(iter(group_sizes), 0), block=next(iter(blocks), (0, 0))
        )

    def awq(self) -> CheckpointFormat:
        bits = self.given.get("bits", self.given.get("w_bit"))
        if bits != 4:
            raise self.refuse("bits", bits, "4 for awq")
        version = str(self.given.get("version") or "gemm").lower()
        if version != "gemm":
            raise self.refuse("version", version, "gemm")
        return CheckpointFormat("awq", "awq", bits=4, group_size=self._group_size(self.given.get("q_group_size")))

    def gptq(self) -> CheckpointFormat:
        bits = self.given.get("bits")
        if bits not in (4, 8):
            raise self.refuse("bits", bits, "4 or 8 for gptq")
        if dynamic := self.given.get("dynamic"):
            raise self.refuse("dynamic", dynamic, "the same bits for all modules")
        stored = self.given.get("checkpoint_format") or "gptq"
        if stored not in ("gptq", "gptq_v2"):
            raise self.refuse("checkpoint_format", stored, "gptq or gptq_v2")
        offset = 1 if stored == "gptq" else 0
        return CheckpointFormat("gptq", "gptq", bits=bits, group_size=self._group_size(None), zero_offset=offset)

    def _group_size(self, other_name: object) -> int:
        size = self.given.get("group_size", other_name)
        return 0 if size == -1 else self._positive("group_size", size)

    def _positive(self, field: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(field, value, "a whole number above 0")
        return value

    def _block(self, field: str, value: object) -> tuple[int, int]:
        if isinstance(value, str):  # "128x128", as older files have it
            value = [int(part) if part.isdigit() else part for part in value.split("x")]
        if not isinstance(value, list) or len(value) != 2:
            raise self.refuse(field, value, "[outputs, inputs]")
        return self._positive(field, value[0]), self._positive(field, value[1])
