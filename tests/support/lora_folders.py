"""Small random LoRA adapters on disk, as PEFT writes them, and the same adapters merged into a model's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PREFIX = "base_model.model."


def module_weights(model_folder: Path) -> dict[str, list[int]]:
    """Shapes [outputs, inputs] of all adaptable weights of a model's folder, by their names without ".weight"."""
    weights = load_file(model_folder / "model.safetensors")
    return {
        name.removesuffix(".weight"): list(tensor.shape)
        for name, tensor in weights.items()
        if name.split(".")[-2] in MODULES and name.endswith(".weight")
    }


def save_adapter(
    folder: Path,
    model_folder: Path,
    *,
    rank: int = 8,
    modules: Sequence[str] = MODULES,
    seed: int = 0,
    size: float = 0.1,
    skipped_layers: Sequence[int] = (),
    **config: Any,
) -> Path:
    """Write an adapter of random matrices for a model's folder. size: their standard deviation. config: further fields."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in sorted(module_weights(model_folder).items()):
        if name.split(".")[-1] in modules and int(name.split(".")[2]) not in skipped_layers:
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{PREFIX}{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    described |= {"target_modules": list(modules), **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def save_merged(folder: Path, model_folder: Path, adapter_folder: Path) -> Path:
    """Write a model's folder with W + scaling * B @ A in the place of each adapted W, computed in float64."""
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    weights, adapter = load_file(model_folder / "model.safetensors"), load_file(adapter_folder / "adapter_model.safetensors")
    for name in module_weights(model_folder):
        if (down := adapter.get(f"{PREFIX}{name}.lora_A.weight")) is not None:
            up = adapter[f"{PREFIX}{name}.lora_B.weight"]
            merged = weights[f"{name}.weight"].double() + scaling * up.double() @ down.double()
            weights[f"{name}.weight"] = merged.to(weights[f"{name}.weight"].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for path in model_folder.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
