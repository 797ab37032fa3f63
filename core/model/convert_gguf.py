"""Converts a GGUF file into a Hugging Face folder: python -m core.model.convert_gguf SRC.gguf DEST_FOLDER.

Started as a child process by core/model_files, which owns the folder's place and its atomicity. Weights are dequantized once,
to float32; every process then maps plain safetensors. gguf_architectures.py knows what is called how.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from core.errors import ModelLoadError
from core.model.gguf_architectures import Floats, GgufArchitecture, find_architecture, read_config
from core.model.gguf_header import check_gguf_header
from core.model.gguf_tokenizer import write_tokenizer
from core.model_files import CONFIG_FILE, WEIGHTS_FILE

# What reading arbitrary bytes as GGUF ends in: the library checks little, and numpy the rest.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, struct.error)


def convert_gguf(source: Path, dest: Path) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer of `source` into folder `dest`.

    Raises ModelLoadError if the file is no GGUF, or holds something that this converter would have to drop.
    """
    _progress(f"reading {source}")
    try:
        check_gguf_header(source)
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except _UNREADABLE as error:
        raise ModelLoadError(f"{source}: not a readable GGUF file ({error})") from error
    architecture = find_architecture(fields)
    config = read_config(fields, has_output_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    write_tokenizer(fields, dest, config["max_position_embeddings"])
    tensors: dict[str, Floats] = {}
    for count, tensor in enumerate(reader.tensors, 1):
        name, values = convert_tensor(tensor, architecture, config)
        tensors[name] = values
        if count % 100 == 0 or count == len(reader.tensors):
            _progress(f"dequantized {count} of {len(reader.tensors)} tensors")
    save_file(tensors, dest / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(dest / CONFIG_FILE, config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config[name] is not None}
    _write_json(dest / "generation_config.json", special)
    _progress(f"wrote {dest}")


def convert_tensor(tensor: Any, architecture: GgufArchitecture, config: dict[str, Any]) -> tuple[str, Floats]:
    """One GGUF tensor as (Hugging Face name, float32 array). Raises ModelLoadError for one that the architecture lacks."""
    name = architecture.tensor_name(tensor.name)
    if name is None:
        raise ModelLoadError(f"GGUF tensor {tensor.name!r} is not part of a plain {config['model_type']} model")
    try:
        values = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (*_UNREADABLE, NotImplementedError) as error:
        raise ModelLoadError(f"GGUF tensor {tensor.name!r} cannot be dequantized ({error})") from error
    return name, architecture.convert(name, values, config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _progress(text: str) -> None:
    print(f"convert_gguf: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code 0 when the folder is whole; 1 with one line on stderr when the file cannot be converted."""
    if len(sys.argv) != 3:
        print("usage: python -m core.model.convert_gguf SRC.gguf DEST_FOLDER", file=sys.stderr)
        return 2
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelLoadError as error:
        _progress(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
