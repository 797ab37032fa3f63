"""Finds tool calls in what a model writes, as it is written: text in, content and pieces of calls out.

The outcome does not depend on how the text is cut. What is no call after all is content; it is only too late for that when
arguments were handed out already: then CallBroken says so. One class for all formats; a new one is an entry of FORMATS.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from router.tool_call_scanner import MAX_NAME_CHARS, CallScanner

MAX_CALLS = 128
_NAME = re.compile(rf"([A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}})(?:\[CALL_ID\][A-Za-z0-9]{{1,64}})?(?:\[ARGS\])?\s{{0,16}}(?=\{{)")
_SLICE_CHARS = 4096  # looked at together: what is held back is copied for each step
_MAX_NAME_TEXT = MAX_NAME_CHARS + 128


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes calls. marker comes before them ("": none does), end_tag behind each, separator between two.

    may_begin_bare: a text may begin with a call, without a marker. has_arrays: several may stand in one JSON array. has_named: a
    call may be its name, in plain, and the object of its arguments. name: each call is the arguments of this function alone.
    """

    marker: str = ""
    end_tag: str = ""
    separator: str = ""
    may_begin_bare: bool = False
    has_arrays: bool = False
    has_named: bool = False
    has_short_ids: bool = False  # nine letters and digits, which the template insists on
    name: str = ""


FORMATS = {
    "hermes": ToolCallFormat(marker="<tool_call>", end_tag="</tool_call>"),
    "llama3_json": ToolCallFormat(marker="<|python_tag|>", separator=";", may_begin_bare=True),
    "mistral": ToolCallFormat(marker="[TOOL_CALLS]", has_arrays=True, has_named=True, has_short_ids=True),
}
REQUIRED_FORMAT = ToolCallFormat(may_begin_bare=True, has_arrays=True)  # of what tool_choice "required" forces


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call whose name is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that began is none: it is no JSON, or it was cut off. text: all of it, which would have been content."""

    index: int
    text: str


Piece = Content | CallBegin | CallArguments | CallBroken


class _State(enum.Enum):
    CONTENT = "content"
    OPENING = "opening"  # a call is due
    CALL = "call"
    CLOSING = "closing"  # a call has ended


class ToolCallParser:
    """Of one text. Everything it holds back is bounded by a marker's, a name's or a call's length."""

    def __init__(self, layout: ToolCallFormat) -> None:
        self._format = layout
        self._state = _State.OPENING if layout.may_begin_bare or layout.name else _State.CONTENT
        self._held = ""
        self._opening: list[str] = []  # what was taken for the beginning of a call, and is content if none follows
        self._spaces: list[str] = []  # before the first other character of content: dropped if a call comes instead
        self._has_content = False
        self._has_marker = False  # in _opening
        self._is_in_array = False
        self._is_announced = False  # the call's CallBegin is out
        self._num_calls = 0
        self._scanner: CallScanner | None = None
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """Take more; what became certain."""
        for start in range(0, len(text), _SLICE_CHARS):
            self._held += text[start : start + _SLICE_CHARS]
            self._run(is_final=False)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """No more text: what was held back."""
        self._run(is_final=True)
        if self._scanner is not None:
            self._give_up_call()
        self._give_up_opening()
        if self._num_calls == 0:
            self._pieces += [Content(text) for text in self._spaces]
        return self._take_pieces()

    # -- states: each takes what it can from _held, and returns False when it needs more ---------------------------------
    def _run(self, *, is_final: bool) -> None:
        steps = {
            _State.CONTENT: self._read_content,
            _State.OPENING: self._read_opening,
            _State.CALL: self._read_call,
            _State.CLOSING: self._read_closing,
        }
        while self._held and steps[self._state](is_final):
            pass

    def _read_content(self, is_final: bool) -> bool:
        marker = self._format.marker
        start = self._held.find(marker) if marker and self._num_calls < MAX_CALLS else -1
        if start >= 0:
            self._add_content(self._advance(start))
            self._open(self._advance(len(marker)), has_marker=True)
            return True
        num_kept = 0 if is_final else _num_maybe_marker(self._held, marker)
        self._add_content(self._advance(len(self._held) - num_kept))
        return False

    def _read_opening(self, is_final: bool) -> bool:
        layout = self._format
        if spaces := self._skip_spaces():
            self._opening.append(spaces)
        if not self._held:
            return False
        if self._num_calls < MAX_CALLS and self._held[0] == "{":
            self._begin_call(layout.name)
            return True
        if layout.has_arrays and self._held[0] == "[" and not self._is_in_array:
            self._is_in_array = True
            self._opening.append(self._advance(1))
            return True
        if layout.may_begin_bare and layout.marker and not self._has_marker:
            if self._held.startswith(layout.marker):
                self._open(self._advance(len(layout.marker)), has_marker=True)
                return True
            if layout.marker.startswith(self._held) and not is_final:
                return False
        if layout.has_named and not self._is_in_array and self._num_calls < MAX_CALLS:
            if found := _NAME.match(self._held):
                self._opening.append(self._advance(found.end()))
                self._begin_call(found[1])
                return True
            if not is_final and len(self._held) < _MAX_NAME_TEXT and "{" not in self._held:
                return False
        self._give_up_opening()
        return True

    def _read_call(self, _is_final: bool) -> bool:
        scanner = self._scanner
        assert scanner is not None
        num_taken, arguments = scanner.push(self._held)
        self._advance(num_taken)
        if scanner.has_begun and not self._is_announced:
            self._is_announced = True
            self._pieces.append(CallBegin(self._num_calls, scanner.name))
        if arguments:
            self._pieces.append(CallArguments(self._num_calls, arguments))
        if scanner.is_broken:
            self._give_up_call()
        elif scanner.is_done:
            self._end_call(scanner)
        return bool(self._held)

    def _read_closing(self, is_final: bool) -> bool:
        layout = self._format
        self._skip_spaces()
        if not self._held:
            return False
        if layout.end_tag and self._held.startswith(layout.end_tag):
            self._advance(len(layout.end_tag))
        elif layout.end_tag and layout.end_tag.startswith(self._held) and not is_final:
            return False
        elif self._is_in_array and self._held[0] == ",":
            self._open(self._advance(1))
            return True
        elif self._is_in_array and self._held[0] == "]":
            self._advance(1)
        elif layout.separator and self._held[0] == layout.separator:
            self._open(self._advance(1))
            return True
        self._is_in_array = False
        self._state = _State.CONTENT
        return True

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _open(self, text: str, *, has_marker: bool = False) -> None:
        self._opening.append(text)
        self._has_marker |= has_marker
        self._state = _State.OPENING

    def _begin_call(self, name: str) -> None:
        self._is_announced = False
        self._scanner = CallScanner(name)
        self._state = _State.CALL

    def _end_call(self, scanner: CallScanner) -> None:
        arguments = scanner.arguments_left()
        if arguments is None:
            self._give_up_call()
            return
        if arguments:
            self._pieces += [CallBegin(self._num_calls, scanner.name), CallArguments(self._num_calls, arguments)]
        self._num_calls += 1
        self._scanner = None
        self._opening, self._spaces = [], []
        self._has_marker = self._has_content = False
        self._state = _State.CLOSING

    def _give_up_call(self) -> None:
        scanner, self._scanner = self._scanner, None
        assert scanner is not None
        if scanner.has_begun:
            self._pieces.append(CallBroken(self._num_calls, "".join(self._opening) + scanner.text))
            self._opening = []
            self._num_calls += 1
        else:
            self._opening.append(scanner.text)
        self._give_up_opening()

    def _give_up_opening(self) -> None:
        text = "".join(self._opening)
        self._opening = []
        self._has_marker = self._is_in_array = False
        self._state = _State.CONTENT
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        if not self._has_content:
            if not text.strip():
                if text and self._num_calls == 0:
                    self._spaces.append(text)
                return
            self._has_content = True
            text = "".join(self._spaces) + (text.lstrip() if self._num_calls else text)
            self._spaces = []
        if text:
            self._pieces.append(Content(text))

    def _skip_spaces(self) -> str:
        return self._advance(len(self._held) - len(self._held.lstrip()))

    def _advance(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def guess_format(template_source: str) -> str:
    """The name of the format that a chat template asks for, by what it writes for past calls; "" when none is recognized."""
    if "<tool_call>" in template_source and "<function=" not in template_source:
        return "hermes"
    if "[TOOL_CALLS]" in template_source:
        return "mistral"
    if "<|python_tag|>" in template_source or "<|start_header_id|>" in template_source:
        return "llama3_json"
    return ""


def _num_maybe_marker(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which the marker begins."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
