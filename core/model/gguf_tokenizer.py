"""A GGUF file's tokenizer as tokenizer.json: byte BPE (gpt2), and SentencePiece's (llama), whose merges follow from scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from core.errors import ModelLoadError
from core.model.gguf_architectures import token_id_of
from core.model_files import TOKENIZER_FILE

_SPACE = "▁"  # how SentencePiece writes a space
_LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA_BPE, "qwen2": _LLAMA_BPE.replace(r"\p{N}{1,3}", r"\p{N}")}


def write_tokenizer(fields: Mapping[str, Any], dest: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja. Raises ModelLoadError."""
    kind = fields.get("tokenizer.ggml.model")
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type") or [int(gguf.TokenType.NORMAL)] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelLoadError("GGUF tokenizer: there must be one type per token, and no token twice")
    if kind == "gpt2":
        tokenizer = _byte_bpe(fields, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(fields, tokens)
    else:
        raise ModelLoadError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2 (byte BPE), llama (SentencePiece BPE)")
    special = [token for token, of_type in zip(tokens, types, strict=True) if of_type == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [token for token, of_type in zip(tokens, types, strict=True) if of_type == gguf.TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    first = token_id_of(fields, "bos", len(tokens))
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and first is not None:
        name = tokens[first].replace(":", "::") if ":" in tokens[first] else tokens[first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, first)]
        )
    tokenizer.save(str(dest / TOKENIZER_FILE))
    _write_settings(fields, tokens, dest, max_length)


def _texts(fields: Mapping[str, Any], key: str) -> list[str]:
    texts = fields.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelLoadError(f"GGUF field {key}: a list of texts is missing")
    return texts


def _byte_bpe(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in _texts(fields, "tokenizer.ggml.merges")]
    kind = fields.get("tokenizer.ggml.pre", "default")
    splitters = _pre_tokenizers(kind)
    tokenizer = Tokenizer(_bpe(tokens, merges))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizers(kind: object) -> list[Any]:
    """How text is split before byte BPE, by GGUF's name for it. Raises ModelLoadError for a name not known here."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("gpt-2", "default"):
        return [byte_level]
    if kind == "smollm":  # every digit is a token of its own, then GPT-2's split
        return [pre_tokenizers.Digits(individual_digits=True), byte_level]
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[str(kind)]), behavior="isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    supported = ", ".join(("gpt-2", "smollm", *_SPLITS))
    raise ModelLoadError(f"GGUF pre-tokenizer {kind!r} is not supported; supported: {supported}")


def _sentencepiece_bpe(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Two tokens that lie side by side merge into the one with the highest score: as a list of merges, best score first."""
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError("GGUF field tokenizer.ggml.scores: one number per token is missing")
    id_by_token = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, ...]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in id_by_token and right in id_by_token:
                ranked.append((-score, id_by_token[left], id_by_token[right], (left, right)))
    unknown = token_id_of(fields, "unknown", len(tokens))
    tokenizer = Tokenizer(
        _bpe(
            tokens,
            [pair for *_order, pair in sorted(ranked)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _bpe(tokens: list[str], merges: list[tuple[str, ...]], **options: Any) -> BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelLoadError(f"GGUF tokenizer: merge {' '.join(merge)!r} is not of two tokens that make a third")
        pairs.append((merge[0], merge[1]))
    return BPE(vocab=vocab, merges=pairs, **options)


def _write_settings(fields: Mapping[str, Any], tokens: list[str], dest: Path, max_length: int) -> None:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = token_id_of(fields, key, len(tokens))
        if token_id is not None:
            settings[f"{role}_token"] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        settings["chat_template"] = template
        (dest / "chat_template.jinja").write_text(template)
    (dest / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
