"""Streaming text of one sequence: token ids in, text out that will never change, cut at stop strings.

Cost is linear in the tokens. Used by the HTTP handlers, one object per choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from router.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16  # a character has at most four bytes: what is longer incomplete is no UTF-8 and never will be
NUM_CONTEXT_TOKENS = 8  # of the prompt, since some decoders write the first token of a text differently


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Outcome of a push. num_tokens: how many of the pushed tokens count; fewer than pushed when a stop string ended the text."""

    text: str
    num_tokens: int
    stop_string: str | None = None


class Detokenizer:
    """Text of one sequence with stop strings.

    Text is held back while it may be half a character or the beginning of a stop string. The result does not depend on how
    tokens are grouped into pushes: the text ends at the first character at which some stop string is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """min_tokens: a stop string counts only when it ends in text of a later token than the min_tokens-th."""
        self._pieces: _ByteLevelPieces | _WindowPieces
        if tokenizer.token_bytes(0) is not None:
            self._pieces = _ByteLevelPieces(tokenizer, skip_special_tokens)
        else:
            self._pieces = _WindowPieces(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0
        self._is_stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take more tokens; return the text that became certain."""
        assert not self._is_stopped, "nothing follows a stop string"
        texts = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text, stop_string = self._take(self._pieces.push(token_id))
            texts.append(text)
            if stop_string is not None:
                self._is_stopped = True
                return TextDelta("".join(texts), count, stop_string)
        return TextDelta("".join(texts), len(token_ids))

    def finish(self) -> TextDelta:
        """No more tokens: return what was held back. An incomplete character becomes U+FFFD."""
        if self._is_stopped:
            return TextDelta("", 0)
        text, stop_string = self._take(self._pieces.finish())
        held, self._held = self._held, ""
        return TextDelta(text if stop_string is not None else text + held, 0, stop_string)

    def _take(self, new_text: str) -> tuple[str, str | None]:
        """Add text; return what can be given out, and the stop string that ended it."""
        if not self._stop:
            return new_text, None
        if not new_text:
            return "", None
        num_old, text = len(self._held), self._held + new_text
        if self._num_tokens > self._min_tokens and (found := self._first_stop(text, num_old)) is not None:
            start, stop_string = found
            self._held = ""
            return text[: start + len(stop_string) if self._include_stop else start], stop_string
        num_held = self._num_maybe_stop(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def _first_stop(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The stop string that is complete first, and where it starts; of several, the longest. Ends after num_old characters."""
        best: tuple[int, int, str] | None = None
        for stop_string in self._stop:
            start = text.find(stop_string, max(0, num_old + 1 - len(stop_string)))
            if start >= 0 and (best is None or (start + len(stop_string), start) < best[:2]):
                best = (start + len(stop_string), start, stop_string)
        return (best[1], best[2]) if best is not None else None

    def _num_maybe_stop(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = min(len(text), max(len(stop_string) for stop_string in self._stop) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(len(stop_string) > length and stop_string.startswith(end) for stop_string in self._stop):
                return length
        return 0


class _ByteLevelPieces:
    """Byte-level tokenizers: tokens are bytes, so that an incremental UTF-8 decoder gives exactly the whole text's decoding."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id) or b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowPieces:
    """Any other tokenizer: decode a window of the last tokens twice, without and with the new ones; the difference is new text.

    The window starts at the last place where text was complete but one, so that decoders which look at neighbours (spaces at
    a beginning) see some.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_read = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before, after = self._decode_both()
        is_incomplete = after.endswith(REPLACEMENT) and len(self._window) - self._num_read < MAX_HELD_TOKENS
        if len(after) <= len(before) or is_incomplete:
            if len(self._window) - self._num_read >= MAX_HELD_TOKENS:  # tokens without text, e.g. special ones
                self._advance()
            return ""
        self._advance()
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._decode_both()
        self._advance()
        return after[len(before) :]

    def _decode_both(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=self._skip_special_tokens)
        return before, self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _advance(self) -> None:
        del self._window[: self._num_read]
        self._num_read = len(self._window)
