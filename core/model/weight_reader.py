"""Tensors by name over a folder's safetensors files, memory mapped: a tensor that is served as it is stored is never copied.

So nodes on one host share its pages. What must be cast, or undone from a quantized checkpoint, is this process's own.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelLoadError
from core.model.checkpoint_formats import FLOAT_CHECKPOINT, CheckpointFormat, read_checkpoint_format
from core.model.dequantizers import TensorSource, dequantizer_of
from core.model_files import CONFIG_FILE, WEIGHTS_INDEX_FILE, list_weight_files, read_weight_map

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_NAMED = 3  # names of tensors in one message


class WeightReader(TensorSource):
    """Use as a context manager: files are open until exit. Tensors outlive it, since each holds the mapping that it lies in.

    A checkpoint that config.json calls quantized is dequantized tensor by tensor: `read` knows only float weights. The files
    must not be cut short while a tensor lives; replacing them by a rename is safe.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelLoadError for files that are missing, truncated or unreadable, or that lack what their index says."""
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._file_by_name: dict[str, Any] = {}
        try:
            self._open_all()
            self._dequantizer = dequantizer_of(_format_of(model_dir), self)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, cast, contiguous; the mapped file's own memory where that is what it holds.

        Raises ModelLoadError if it is missing, or of another shape, or not floating.
        """
        module = name.removesuffix(".weight")
        if self._dequantizer is not None and module != name and self._dequantizer.is_quantized(module):
            return self._dequantizer.read(module, shape).to(self._device, self._dtype).contiguous()
        tensor = self.stored(name)
        if tensor.dtype not in FLOATS:
            hint = "" if self._dequantizer else f"; if it is quantized, {CONFIG_FILE} lacks the quantization_config"
            raise ModelLoadError(f"{self._model_dir}: tensor {name} has dtype {tensor.dtype}, expected a floating one{hint}")
        self.check_shape(name, tensor, shape)
        return tensor.to(self._device, self._dtype).contiguous()

    def read_stacked(self, prefix: str, parts: list[tuple[str, int]], num_inputs: int, suffix: str = "weight") -> Tensor:
        """Tensors {prefix}.{part}.{suffix} stacked along their outputs. parts: (name, outputs)."""
        shapes: list[tuple[str, tuple[int, ...]]] = [
            (f"{prefix}.{name}.{suffix}", (outputs, num_inputs) if suffix == "weight" else (outputs,)) for name, outputs in parts
        ]
        tensors = [self.read(name, shape) for name, shape in shapes]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def has(self, name: str) -> bool:
        """See TensorSource."""
        return name in self._file_by_name

    def names(self) -> list[str]:
        """See TensorSource."""
        return list(self._file_by_name)

    def stored(self, name: str) -> Tensor:
        """See TensorSource."""
        file = self._file_by_name.get(name)
        if file is None:
            packed = [name.removesuffix("weight") + suffix for suffix in ("qweight", "weight_packed")]
            found = [other for other in packed if self.has(other)]
            hint = f" (but there is {found[0]}: quantized weights need {CONFIG_FILE}'s quantization_config)" if found else ""
            raise ModelLoadError(f"{self._model_dir}: missing tensor {name}{hint}")
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelLoadError(f"{self._model_dir}: tensor {name} cannot be read ({error})") from error
        return tensor

    def fail(self, message: str) -> ModelLoadError:
        """See TensorSource."""
        return ModelLoadError(f"{self._model_dir}: {message}")

    def _open_all(self) -> None:
        index_path = self._model_dir / WEIGHTS_INDEX_FILE
        weight_map = read_weight_map(index_path) if index_path.is_file() else None
        repeated: Counter[str] = Counter()
        for path in list_weight_files(self._model_dir):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error
            held = set(names)
            if weight_map is None:
                repeated.update(names)
            else:
                names = [name for name, file_name in weight_map.items() if file_name == path.name]
                absent = [name for name in names if name not in held]
                if absent:
                    raise ModelLoadError(f"{path}: lacks {_some(absent)}, which {WEIGHTS_INDEX_FILE} says it holds")
            self._file_by_name.update(dict.fromkeys(names, file))
        twice = [name for name, count in repeated.items() if count > 1]
        if twice:
            raise ModelLoadError(f"{self._model_dir}: {_some(twice)} in several files; allowed: once, or {WEIGHTS_INDEX_FILE}")


def _format_of(model_dir: Path) -> CheckpointFormat:
    path = model_dir / CONFIG_FILE
    if not path.is_file():  # weights alone, as tests and tools have them
        return FLOAT_CHECKPOINT
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error})") from error
    return read_checkpoint_format(config, model_dir)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_MAX_NAMED])}{more}"
