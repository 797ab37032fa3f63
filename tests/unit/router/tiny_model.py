"""A model folder without weights: a byte-level tokenizer trained on a few sentences, a chat template and a config.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_MODEL_LEN = 256
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat",
    "hello world, hello router, hello prefill node and decode node",
    "日本語のテキスト 你好世界 naïve café 🙂🙃 Ελληνικά",
]
CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_byte_level_folder(folder: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json and config.json into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain added", special=False)])
    tokenizer.enable_truncation(8)  # as training set-ups leave it; serving must not cut prompts
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model_config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": MAX_MODEL_LEN}
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder


def build_byte_fallback_folder(folder: Path) -> Path:
    """The other kind of tokenizer: pieces with a space mark, bytes only where the vocabulary lacks a character."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", *"abcdefghijklmnop"]
    model = models.BPE(
        vocab={piece: place for place, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
