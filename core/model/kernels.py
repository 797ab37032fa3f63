"""Which kernels compute a model: this project's compiled ones on the CPU, or plain torch. Decided once, at load."""

from __future__ import annotations

from typing import Any

import torch

from core.errors import ConfigError
from core.model.native.build import load_native
from core.model.native_linear import NATIVE_DTYPES


def choose_native(cpu_kernels: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The compiled extension if it is to compute `dtype` on `device`, else None. cpu_kernels: auto, native or torch.

    Raises ConfigError where native is asked for and cannot be.
    """
    is_possible = device.type == "cpu" and dtype in NATIVE_DTYPES
    if cpu_kernels == "native" and not is_possible:
        names = " or ".join(NATIVE_DTYPES.values())
        raise ConfigError("engine.cpu_kernels", cpu_kernels, f"auto or torch: native computes {names} on the CPU alone")
    if cpu_kernels == "torch" or not is_possible:
        return None
    native = load_native()
    if native is None and cpu_kernels == "native":
        raise ConfigError(
            "engine.cpu_kernels", cpu_kernels, "auto or torch: the kernels cannot be compiled here (see the warning)"
        )
    return native


def kernel_class(native: Any) -> str:
    """Names what computes: KV of different classes may differ in bits."""
    return "torch" if native is None else f"native {native.INSTRUCTIONS}"
