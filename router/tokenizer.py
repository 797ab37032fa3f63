"""Text to token ids and back, from a Hugging Face folder's tokenizer.json, without transformers.

Chat templates are in chat_template.py, streaming text in detokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from core.errors import ModelLoadError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The model's tokenizer. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError when tokenizer.json is missing or unreadable."""
        self.folder = folder
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._fast = FastTokenizer.from_str(text)
            decoder = json.loads(text).get("decoder") or {}
        except OSError as error:
            raise ModelLoadError(f"{path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise ModelLoadError(f"{path}: not a tokenizer ({error})") from error
        # A prompt is never cut or filled up, whatever the training set-up left in the file.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.config = _read_json(folder / "tokenizer_config.json")
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocabulary), default=1)  # no token stands for more characters of a text
        added = self._fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._bytes_by_token_id: dict[int, bytes] = {}
        self._byte_by_char = _byte_by_char()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids, as transformers does by default."""
        # The batch form, since it lets other threads run meanwhile.
        ids: list[int] = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`; U+FFFD stands for bytes that are no UTF-8. Ids outside the vocabulary have no text."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to the text, wherever it stands; None if the tokenizer is not byte-level."""
        if not self._is_byte_level:
            return None
        known = self._bytes_by_token_id.get(token_id)
        if known is None:
            known = self._bytes_by_token_id[token_id] = self._spell(token_id)
        return known

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token."""
        return self._fast.token_to_id(text) in self.special_token_ids

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, for chat templates."""
        tokens = {}
        for name in SPECIAL_TOKEN_NAMES:
            value = self.config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
        return tokens

    def _spell(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._byte_by_char[char] for char in token)
        except KeyError:  # an added token is written as it is
            return token.encode()


def _byte_by_char() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_by_char = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    byte_by_char.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return byte_by_char


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return loaded
