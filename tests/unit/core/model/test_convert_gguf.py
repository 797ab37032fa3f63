"""GGUF files of each family, written with gguf's own table of names from a transformers model, must give that model back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from core.errors import ModelLoadError
from core.model.convert_gguf import convert_gguf
from core.model.gguf_architectures import read_config

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
TOKENS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrst", "ab"]
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"sliding_window": 16}),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    ),
}


def make_model(family: str) -> Any:
    config_type, model_type, more = FAMILIES[family]
    torch.manual_seed(0)
    model = model_type(config_type(**{**SHAPE, **more, "attn_implementation": "eager"})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(path: Path, family: str, model: Any, tokenizer: str = "gpt2") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma3":
        writer.add_rope_freq_base(1e6)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy().copy()
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values += 1.0
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_gguf_each_family_gives_the_models_logits_back(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "m.gguf", family, model)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(found) is type(model)
    token_ids = torch.tensor([[1, *random.Random(0).choices(range(3, 24), k=30)]])  # past the windows
    with torch.inference_mode():
        expected, logits = model(token_ids).logits, found(token_ids).logits
    assert torch.allclose(logits, expected, atol=1e-5), (logits - expected).abs().max()
    assert expected.std() > 1e-3
    assert found.generation_config.eos_token_id == 2


def test_convert_gguf_garbage_is_an_error_of_its_own_wherever_it_lies(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    whole = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(0)
    num_refused = 0
    for attempt in range(90):
        if attempt < 30:
            damaged = whole[: rng.randrange(len(whole))]
        else:
            damaged = bytearray(whole)
            for _ in range(rng.randrange(1, 6)):
                damaged[rng.randrange(1600)] = rng.randrange(256)  # of the metadata
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        try:
            convert_gguf(tmp_path / "damaged.gguf", folder)
        except ModelLoadError:
            num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2, qwen3, gemma2"),
        ({"general.architecture": None}, "architecture None"),
        ({"llama.block_count": None}, r"lacks the field llama\.block_count"),
        ({"llama.block_count": "two"}, r"field llama\.block_count is 'two'; allowed: a whole number above 0"),
        ({"llama.attention.head_count": 0}, r"field llama\.attention\.head_count is '0'"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is 'nan'"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"tokenizer.ggml.tokens": None}, r"lacks the field tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.eos_token_id": 3}, r"eos_token_id is 3; allowed: 0 to 2"),
    ],
)
def test_read_config_malformed_metadata_raises_naming_the_field(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.context_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["a", "b", "c"],
    }
    assert read_config(fields, has_output_head=True)["head_dim"] == 4
    fields = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    with pytest.raises(ModelLoadError, match=message):
        read_config(fields, has_output_head=True)


def test_gguf_sentencepiece_tokenizer_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    from core.model.gguf_tokenizer import write_tokenizer

    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [("lo", -1.0, NORMAL), ("el", -2.0, NORMAL), ("hel", -3.0, NORMAL), ("▁hel", -4.0, NORMAL)]
    pieces += [(letter, -10.0 - place, NORMAL) for place, letter in enumerate("▁helo")]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_tokenizer(fields, tmp_path, 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode("hello é</s>")
    assert encoded.tokens == ["<s>", "▁hel", "lo", "▁", "<0xC3>", "<0xA9>", "</s>"]  # "lo" is better than "hell" would be
    assert tokenizer.decode(encoded.ids) == "hello é"
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["▁hel", "lo"]
    write_tokenizer({**fields, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, tmp_path, 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hel", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"
    for broken in ({"tokenizer.ggml.scores": [1.0]}, {"tokenizer.ggml.tokens": [1, 2]}, {"tokenizer.ggml.token_type": [1]}):
        with pytest.raises(ModelLoadError, match="GGUF"):
            write_tokenizer({**fields, **broken}, tmp_path, 64)


def test_gguf_byte_bpe_with_merges_of_unknown_tokens_raises(tmp_path: Path) -> None:
    from core.model.gguf_tokenizer import write_tokenizer

    fields: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    for merges in (["a c"], ["a"], [""]):
        with pytest.raises(ModelLoadError, match=r"GGUF tokenizer: merge .* is not of two tokens that make a third"):
            write_tokenizer({**fields, "tokenizer.ggml.merges": merges}, tmp_path, 64)
    with pytest.raises(ModelLoadError, match=r"'gpt-4o' is not supported; supported: gpt-2, smollm, llama-bpe"):
        write_tokenizer({**fields, "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "gpt-4o"}, tmp_path, 64)


def test_float32_arrays_of_gguf_are_what_was_written(tmp_path: Path) -> None:
    model = make_model("qwen2")
    write_gguf(tmp_path / "m.gguf", "qwen2", model)
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    from safetensors.numpy import load_file

    found = load_file(tmp_path / "model.safetensors")
    expected = model.state_dict()
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name].numpy()) for name in found)
