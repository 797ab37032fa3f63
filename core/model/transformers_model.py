"""Causal models of other families, through transformers' own classes with our paged attention in them; slower than llama.py.

transformers looks attention up by name for each layer's module. The function that is registered here hands it to the module's
PagedLayers, which belong to one loaded model. Before the model serves, transformers_check.py compares it with the attention that
transformers itself would have used.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from core.errors import ModelLoadError
from core.model.activations import Activation, gelu, gelu_tanh, silu
from core.model.architecture import ModelArchitecture
from core.model.attention import AttentionBackend
from core.model.linear import ROW_MULTIPLE, padded_num_rows
from core.model.lora import AdapterRows

ATTENTION_NAME = "kvrelay"
_PAGED_ATTRIBUTE = "kvrelay_paged_layers"
# What attention gets by keyword and need not look at, because the backend knows it or it is for training.
_KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})
# By the name of the module's class: those whose result depends on where in a batch an element lies, see activations.py.
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": silu,
    "SiLUActivation": silu,
    "GELUTanh": gelu_tanh,
    "NewGELUActivation": gelu_tanh,
    "FastGELUActivation": gelu_tanh,
    "GELU": gelu,
    "GELUActivation": gelu,
}

_logger = logging.getLogger(__name__)


class PagedLayers:
    """What the attention modules of one model write to and read from during a forward pass."""

    def __init__(self, architecture: ModelArchitecture, attention: AttentionBackend) -> None:
        self._architecture = architecture
        self._attention = attention
        self._kv_caches: Sequence[tuple[Tensor, Tensor]] = ()
        self.layers_seen: list[int] = []
        self.windows_seen: set[int] = set()

    def begin_forward(self, kv_caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._kv_caches = kv_caches
        self.layers_seen.clear()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """[1, num_rows, num_heads, head_dim]. query, key, value: [1, heads, num_rows, head_dim]; options: see _attend_paged.

        Raises ModelLoadError for what the backend does not compute.
        """
        self._check(module, query, key, value, options)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.layers_seen.append(layer)
        scale = options.get("scaling")
        key_cache, value_cache = self._kv_caches[layer]
        window, cap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
        self.windows_seen.add(window)
        attended = self._attention.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            key_cache,
            value_cache,
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            sliding_window=window,
            soft_cap=cap,
        )
        return attended[None]

    def _check(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        architecture = self._architecture
        kv_shape = (architecture.num_kv_heads, architecture.head_dim)
        for name, heads, wanted in (
            ("queries", query, (architecture.num_heads, architecture.head_dim)),
            ("keys", key, kv_shape),
            ("values", value, kv_shape),
        ):
            if (heads.shape[1], heads.shape[3]) != wanted:
                raise ModelLoadError(
                    f"a layer has {heads.shape[1]} heads of {heads.shape[3]} in its {name}; "
                    f"supported: the same in all layers, here {wanted[0]} of {wanted[1]}"
                )
        extra = [name for name, given in options.items() if isinstance(given, Tensor) and name not in _KNOWN_TENSORS]
        if extra:
            raise ModelLoadError(f"its attention adds {', '.join(extra)} to the scores, which paged attention does not")
        if not (getattr(module, "is_causal", True) and options.get("is_causal", True) is not False):
            raise ModelLoadError("its attention is not causal")


def _attend_paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls, see its AttentionInterface. The mask is never used: the backend knows who sees whom."""
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    paged: PagedLayers = getattr(module, _PAGED_ATTRIBUTE)
    return paged.attend(module, query, key, value, options), None


class TransformersModel:
    """decoder.DecoderModel around a transformers model."""

    row_multiple = ROW_MULTIPLE

    def __init__(self, model: Any, paged: PagedLayers) -> None:
        """model: with ATTENTION_NAME as its attention, in evaluation mode."""
        self._paged = paged
        self._body = model.base_model
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _PAGED_ATTRIBUTE, paged)
            for name, child in list(module.named_children()):
                if type(child).__name__ in _ACTIVATIONS:
                    setattr(module, name, _ExactActivation(_ACTIVATIONS[type(child).__name__]))
        # What the class does behind its decoder (scales, caps, the projection itself) is its own business: a shallow copy of the
        # model gets hidden states where it asks the decoder for them.
        self._replayed = _Replay()
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._replayed}

    @classmethod
    def load(
        cls,
        model_dir: Path,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
    ) -> TransformersModel:
        """Raises ModelLoadError if the class cannot be loaded or computes something else with our attention."""
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend_paged)
        try:
            model = getattr(transformers, architecture.class_name).from_pretrained(
                model_dir,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
            )
        except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
            raise ModelLoadError(f"{model_dir}: transformers cannot load {architecture.class_name}: {error}") from error
        _logger.info("%s is served through transformers' %s: slower than a family of our own", model_dir, architecture.class_name)
        return cls(model.to(device).eval(), PagedLayers(architecture, attention))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        adapters: Sequence[AdapterRows] = (),
        num_tokens: int = 0,
    ) -> Tensor:
        """See decoder.DecoderModel. There are no adapters for these models (ModelArchitecture.takes_adapters)."""
        assert not adapters
        self._paged.begin_forward(kv_caches)
        outputs = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True)
        self._replayed.outputs = outputs
        hidden: Tensor = outputs.last_hidden_state
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See decoder.DecoderModel. After a forward."""
        num_rows = hidden.shape[0]
        padded = functional.pad(hidden, (0, 0, 0, padded_num_rows(num_rows) - num_rows))
        self._replayed.hidden = padded[None]
        logits: Tensor = self._head(input_ids=None, use_cache=False, return_dict=True).logits
        return logits[0, :num_rows]

    def take_part_seconds(self) -> dict[str, float]:
        """See decoder.DecoderModel."""
        return {}

    @property
    def paged(self) -> PagedLayers:
        """Of the last forward."""
        return self._paged

    def forward_unpaged(self, token_ids: Tensor) -> Tensor:
        """Hidden states [num_tokens, hidden] of one sequence, by transformers' own attention."""
        positions = torch.arange(token_ids.shape[0], device=token_ids.device)
        self._body.set_attn_implementation("eager")
        try:
            hidden: Tensor = self._body(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
            ).last_hidden_state
        finally:
            self._body.set_attn_implementation(ATTENTION_NAME)
        return hidden[0]


class _ExactActivation(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, values: Tensor) -> Tensor:
        return self._activation(values)


class _Replay(nn.Module):
    """Stands where the decoder was, and answers with hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Any = None
        self.hidden: Any = None

    def forward(self, *_args: Any, **_options: Any) -> Any:
        outputs = copy.copy(self.outputs)
        outputs["last_hidden_state"] = self.hidden
        return outputs
