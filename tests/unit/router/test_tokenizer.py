"""Token ids as transformers gives them, and faults of model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import ModelLoadError
from router.tokenizer import Tokenizer


def test_tokenizer_truncation_left_in_the_file_is_switched_off(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("the quick brown fox " * 20, add_special_tokens=True)) > 8


def test_tokenizer_special_tokens_in_text_become_their_ids_and_can_be_skipped(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=False)
    assert (token_ids[0], token_ids[-1]) == (1, 2)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "hello"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_tokenizer_bytes_of_all_tokens_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        assert raw is not None
        assert raw.decode(errors="replace") == tokenizer.decode([token_id], skip_special_tokens=False)


def test_tokenizer_that_is_not_byte_level_has_no_token_bytes(fallback_tokenizer: Tokenizer) -> None:
    assert fallback_tokenizer.token_bytes(5) is None


def test_tokenizer_special_token_names_come_in_both_forms(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens() == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("content", [None, "", "{", json.dumps({"version": "1.0"}), "[]"])
def test_tokenizer_broken_file_is_refused_with_its_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
