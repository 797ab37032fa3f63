"""Converts a Llama GGUF file into a Hugging Face folder: python -m core.model.convert_gguf SRC.gguf DEST_FOLDER.

Started as a child process by core/model_files, which owns the folder's place and its atomicity. Weights are dequantized once,
to float32; every process then maps plain safetensors.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from core.errors import ModelLoadError
from core.model_files import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE

SUPPORTED_ARCHITECTURE = "llama"
TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(source: Path, dest: Path) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer of `source` into folder `dest`.

    Raises ModelLoadError if the file is no GGUF, or holds something that this converter would have to drop.
    """
    _progress(f"reading {source}")
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{source}: not a readable GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(fields, has_output_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for count, tensor in enumerate(reader.tensors, 1):
        name, values = convert_tensor(tensor, config)
        tensors[name] = values
        if count % 100 == 0 or count == len(reader.tensors):
            _progress(f"dequantized {count} of {len(reader.tensors)} tensors")
    save_file(tensors, dest / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(dest / CONFIG_FILE, config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config[name] is not None}
    _write_json(dest / "generation_config.json", special)
    _write_tokenizer(fields, dest, config["max_position_embeddings"])
    _progress(f"wrote {dest}")


def read_config(fields: dict[str, Any], has_output_head: bool) -> dict[str, Any]:
    """A LlamaForCausalLM config.json from GGUF metadata. Raises ModelLoadError for other architectures and scaled RoPE."""
    architecture = fields.get("general.architecture")
    if architecture != SUPPORTED_ARCHITECTURE:
        raise ModelLoadError(f"GGUF architecture {architecture!r} is not supported; supported: {SUPPORTED_ARCHITECTURE}")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"GGUF with RoPE scaling {scaling!r} is not supported; use the model's Hugging Face folder")
    try:
        num_heads = fields["llama.attention.head_count"]
        head_dim = fields.get("llama.attention.key_length", fields["llama.embedding_length"] // num_heads)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": num_heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),  # stored as float32
            "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": not has_output_head,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
        }
    except KeyError as error:
        raise ModelLoadError(f"GGUF file lacks the field {error.args[0]}") from error


def convert_tensor(tensor: Any, config: dict[str, Any]) -> tuple[str, npt.NDArray[np.float32]]:
    """One GGUF tensor as (Hugging Face name, float32 array). Raises ModelLoadError for a name that Llama does not have."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
    if tensor.name in TENSOR_NAMES:
        name = TENSOR_NAMES[tensor.name]
    elif match and match[2] in LAYER_TENSOR_NAMES:
        name = f"model.layers.{match[1]}.{LAYER_TENSOR_NAMES[match[2]]}"
    else:
        raise ModelLoadError(f"GGUF tensor {tensor.name!r} is not part of a plain Llama model")
    values = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if name.endswith("q_proj.weight"):
        values = unpermute_rotary_rows(values, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        values = unpermute_rotary_rows(values, config["num_key_value_heads"])
    return name, values


def unpermute_rotary_rows(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's row order of Q and K, [num_heads * head_dim, hidden]: from RoPE on pairs (0, 1) to RoPE on pairs (0, d/2)."""
    rows, hidden = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, hidden))


def _write_tokenizer(fields: dict[str, Any], dest: Path, max_length: int) -> None:
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError(
            f"GGUF tokenizer {fields.get('tokenizer.ggml.model')!r} is not supported; supported: gpt2 (byte BPE)"
        )
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(fields.get("tokenizer.ggml.pre", "default")))
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.save(str(dest / TOKENIZER_FILE))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[f"{role}_token"] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
        (dest / "chat_template.jinja").write_text(template)
    _write_json(dest / "tokenizer_config.json", settings)


def _pre_tokenizers(kind: str) -> list[Any]:
    """How text is split before byte BPE, by GGUF's name for it. Raises ModelLoadError for a name not known here."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("gpt-2", "default"):
        return [byte_level]
    if kind == "smollm":  # every digit is a token of its own, then GPT-2's split
        return [pre_tokenizers.Digits(individual_digits=True), byte_level]
    if kind == "llama-bpe":
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    raise ModelLoadError(f"GGUF pre-tokenizer {kind!r} is not supported; supported: gpt-2, smollm, llama-bpe")


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
