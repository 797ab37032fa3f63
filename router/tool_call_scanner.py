"""One tool call as models write it: a JSON object with a name and arguments, of which the arguments are handed out as they come.

While text arrives only its brackets and strings are followed, in time linear in it; whether it is JSON is judged at the end.
tool_call_parser.py finds where calls begin.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_CALL_CHARS = 512 * 1024
MAX_DEPTH = 64
MAX_NAME_CHARS = 256
ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]:,]')


class CallScanner:
    """Takes the text of one object, from its `{` on, in any pieces.

    has_begun: the name is known and the arguments are being handed out. Where they come before the name, nothing is handed out
    until is_done. Once is_done or is_broken (this can be no call) no more is taken.
    """

    def __init__(self, name: str = "") -> None:
        """name: given where the object is the arguments alone."""
        self.name = name
        self.has_begun = bool(name)
        self.is_done = False
        self.is_broken = False
        self._is_bare = bool(name)
        self._is_emitting = bool(name)
        self._texts: list[str] = []
        self._num_chars = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._string: list[str] = []  # the last one at depth 1, with its closing quote
        self._key: str | None = None  # at depth 1, while its value comes
        self._is_value_due = False  # nothing came since the key's colon

    @property
    def text(self) -> str:
        """All that was taken."""
        return "".join(self._texts)

    def push(self, text: str) -> tuple[int, str]:
        """Take more; (how many characters were taken, what they add to the arguments)."""
        room = MAX_CALL_CHARS - self._num_chars
        chunk = text[:room]
        position, arguments = 0, ""
        emit_start = 0 if self._is_emitting else -1
        while position < len(chunk) and not (self.is_done or self.is_broken):
            if self._is_in_string:
                position = self._go_through_string(chunk, position)
                continue
            found = _STRUCTURE.search(chunk, position)
            gap_end = found.start() if found else len(chunk)
            if self._is_key_due and (gap := chunk[position:gap_end]).strip():
                self.is_broken = True
                position += len(gap) - len(gap.lstrip())
                break
            position = found.end() if found else len(chunk)
            if found is None:
                continue
            was_emitting = self._is_emitting
            self._take(found[0])
            if self._is_emitting and not was_emitting:
                emit_start = found.start()
            elif was_emitting and not self._is_emitting:
                arguments, emit_start = chunk[emit_start:position], -1
        if emit_start >= 0:
            arguments = chunk[emit_start:position]
        self._texts.append(chunk[:position])
        self._num_chars += position
        if not self.is_done and self._num_chars >= MAX_CALL_CHARS:
            self.is_broken = True
        return position, arguments

    def arguments_left(self) -> str | None:
        """Once is_done: the arguments, if they were not handed out, else ""; None when this is no call, or no JSON."""
        try:
            value: Any = msgspec.json.decode(self.text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if self.has_begun:
            return ""
        name = value.get("name")
        arguments = next((value[key] for key in ARGUMENT_KEYS if key in value), None)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not isinstance(arguments, dict):
            return None
        self.name = name
        return msgspec.json.encode(arguments).decode()

    @property
    def _is_key_due(self) -> bool:
        return self._depth == 1 and self._key is None and not self._is_bare

    def _go_through_string(self, chunk: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped, end = False, position + 1
        elif found := _IN_STRING.search(chunk, position):
            end = found.end()
            self._is_escaped = found[0] == "\\"
            self._is_in_string = self._is_escaped
        else:
            end = len(chunk)
        if self._depth == 1 and len(self._string) <= MAX_NAME_CHARS:
            self._string.append(chunk[position:end])
            if not self._is_in_string and self._key == "name":
                self.name = self._string_value()
                self.is_broken = not self.name
        return end

    def _string_value(self) -> str:
        """The last string at depth 1, "" for one that is too long or no JSON."""
        text = "".join(self._string)
        if len(text) > MAX_NAME_CHARS:
            return ""
        try:
            return msgspec.json.decode(f'"{text}', type=str)
        except (msgspec.DecodeError, UnicodeError):
            return ""

    def _take(self, char: str) -> None:
        """One character of structure, outside strings."""
        was_due, self._is_value_due = self._is_value_due, False
        if char == '"':
            self._is_in_string = True
            self._string.clear()
        elif char in "{[":
            self._depth += 1
            self.is_broken |= self._depth > MAX_DEPTH
            if char == "{" and was_due and self._key in ARGUMENT_KEYS and self.name and not self.has_begun:
                self.has_begun = self._is_emitting = True
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0
            if self._depth == (0 if self._is_bare else 1):
                self._is_emitting = False
        elif self._depth == 1 and not self._is_bare:
            if char == ":" and self._key is None:
                self._key, self._is_value_due = self._string_value(), True
            elif char == ",":
                self._key = None
