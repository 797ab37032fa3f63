"""Tool calls of one chat: what the request allows, the grammar that forces a call, and the reader of each choice's text.

Formats of calls are tool_call_parser.py's; this file knows the API. Refusals are InvalidInputErrors that name field, value and
what is allowed.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidInputError
from router.chat_validation import check_nesting, num_json_bytes
from router.openai_protocol import ChatRequest
from router.structured_outputs import RequestedGrammar, json_schema_grammar
from router.tool_call_parser import (
    FORMATS,
    REQUIRED_FORMAT,
    CallArguments,
    CallBegin,
    CallBroken,
    Content,
    ToolCallFormat,
    ToolCallParser,
)

MAX_TOOLS = 128
MAX_TOOL_BYTES = 1024 * 1024
MAX_TOOL_NESTING = 64
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": one of the tools}}'
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
SHORT_ID_ALPHABET = string.ascii_letters + string.digits


class ToolFunction(msgspec.Struct):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """One of `tools`."""

    type: str
    function: ToolFunction


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What is known of a model. has_template: its chat template can show tools. parser_name: one of FORMATS, "" for unknown."""

    has_template: bool = False
    parser_name: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A checked request's tools. definitions: as the client wrote them, for the template. layout: how calls are written.

    grammar: for output that must be calls and nothing else.
    """

    definitions: list[dict[str, Any]]
    layout: ToolCallFormat
    is_parallel: bool
    has_short_ids: bool
    grammar: RequestedGrammar | None = None

    @property
    def is_named(self) -> bool:
        """Whether the request names the function: then the model did not choose to call, and stops as it would with a text."""
        return bool(self.layout.name)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a delta adds to one call: call_id and name with its first piece, else None."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


def plan_tools(request: ChatRequest, support: ToolSupport) -> ToolUse | None:
    """What a chat may call; None for nothing."""
    choice = request.tool_choice
    if choice not in (None, "none", "auto", "required") and not isinstance(choice, dict):
        raise InvalidInputError("tool_choice", choice, CHOICES)
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidInputError("tool_choice", choice, "none or auto, or any with tools")
        return None
    if choice == "none":
        return None
    if not support.has_template:
        allowed = 'none, or tool_choice "none": the chat template of this model has no place for tools'
        raise InvalidInputError("tools", f"{len(request.tools)} tools", allowed)
    functions = _check_tools(request.tools)
    is_parallel = request.parallel_tool_calls is not False
    layout = FORMATS.get(support.parser_name)
    has_short_ids = layout is not None and layout.has_short_ids
    if choice == "required":
        grammar = json_schema_grammar("tools", _required_schema(functions, is_parallel), any_whitespace=False)
        return ToolUse(request.tools, REQUIRED_FORMAT, is_parallel, has_short_ids, grammar)
    if isinstance(choice, dict):
        function = functions.get(name := _named(choice))
        if function is None:
            raise InvalidInputError("tool_choice", name, f"a function of tools: {', '.join(functions)}")
        grammar = json_schema_grammar("tools", function.parameters or ANY_ARGUMENTS, any_whitespace=False)
        return ToolUse(request.tools, ToolCallFormat(name=name), is_parallel, has_short_ids, grammar)
    if layout is None:
        allowed = f'"none", "required" or a named function, unless router.tool_call_parser is one of {", ".join(FORMATS)}'
        raise InvalidInputError("tool_choice", choice or "auto", f"{allowed}: how this model writes calls is not known")
    return ToolUse(request.tools, layout, is_parallel, has_short_ids)


class ToolCallReader:
    """Reads one choice's text as it arrives."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = ToolCallParser(use.layout)
        self._names: dict[int, CallPiece] = {}  # by index of the parser: every call that began, in order
        self._arguments: dict[int, list[str]] = {}
        self._content: list[str] = []  # with the text of calls that broke

    @property
    def has_calls(self) -> bool:
        """Whether some call began."""
        return bool(self._names)

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallPiece]]:
        """Take more text; what it adds to the content and to calls, one piece for each."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        content: list[str] = []
        begun: dict[int, CallPiece] = {}
        grown: dict[int, list[str]] = {}
        for event in events:
            match event:
                case Content():
                    content.append(event.text)
                    self._content.append(event.text)
                case CallBegin():
                    if self._use.is_parallel or not self._names:
                        begun[event.index] = self._names[event.index] = self._begin(event.name)
                        grown[event.index] = []
                        self._arguments[event.index] = []
                case CallArguments():
                    if event.index in self._names:
                        grown.setdefault(event.index, []).append(event.text)
                        self._arguments[event.index].append(event.text)
                case CallBroken():
                    if self._arguments.pop(event.index, None) is not None:
                        self._content.append(event.text)
        pieces = []
        for index, texts in grown.items():
            head = begun.get(index)
            place = self._names[index].index
            pieces.append(CallPiece(place, "".join(texts), head.call_id if head else None, head.name if head else None))
        return "".join(content), pieces

    def whole(self) -> tuple[str, list[CallPiece]]:
        """Content and calls of all the text, once it has ended. A call that broke is content, although a stream began it."""
        calls: list[CallPiece] = []
        for index, texts in self._arguments.items():
            head = self._names[index]
            calls.append(CallPiece(len(calls), "".join(texts), head.call_id, head.name))
        return "".join(self._content), calls

    def _begin(self, name: str) -> CallPiece:
        if self._use.has_short_ids:
            call_id = "".join(secrets.choice(SHORT_ID_ALPHABET) for _ in range(9))
        else:
            call_id = f"call_{secrets.token_hex(12)}"
        return CallPiece(len(self._names), "", call_id, name)


def check_tool_definitions(tools: Sequence[dict[str, Any]]) -> int:
    """How many bytes tools add to a prompt. Raises InvalidInputError for what no template can be given."""
    if len(tools) > MAX_TOOLS:
        raise InvalidInputError("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    num_bytes = num_json_bytes(tools, "tools")
    if num_bytes > MAX_TOOL_BYTES:
        raise InvalidInputError("tools", f"{num_bytes} bytes", f"at most {MAX_TOOL_BYTES} bytes as JSON")
    check_nesting(tools, "tools", MAX_TOOL_NESTING)
    return num_bytes


# -- inside ------------------------------------------------------------------------------------------------------------
def _check_tools(tools: list[dict[str, Any]]) -> dict[str, ToolFunction]:
    check_tool_definitions(tools)
    functions: dict[str, ToolFunction] = {}
    for place, tool in enumerate(tools):
        try:
            parsed = msgspec.convert(tool, Tool)
        except msgspec.ValidationError as error:
            what, _, path = str(error).rstrip("`").partition(" - at `$")
            allowed = f'{{"type": "function", "function": {{"name": ...}}}} ({what})'
            raise InvalidInputError(f"tools[{place}]{path}", tool, allowed) from error
        if parsed.type != "function":
            raise InvalidInputError(f"tools[{place}].type", parsed.type, "function")
        name = parsed.function.name
        if not NAME_PATTERN.fullmatch(name):
            raise InvalidInputError(f"tools[{place}].function.name", name, "1 to 128 letters, digits, or any of _ . -")
        if name in functions:
            raise InvalidInputError(f"tools[{place}].function.name", name, "a name that no other tool has")
        functions[name] = parsed.function
    return functions


def _named(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidInputError("tool_choice", choice, CHOICES)
    return name


def _required_schema(functions: dict[str, ToolFunction], is_parallel: bool) -> dict[str, Any]:
    """An array of calls, as vLLM has it. Definitions that parameters refer to are found at the root only, so they move there."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, function in functions.items():
        parameters = dict(function.parameters or ANY_ARGUMENTS)
        for key in ("$defs", "definitions"):
            own = parameters.pop(key, None)
            for title, defined in (own if isinstance(own, dict) else {}).items():
                if definitions.setdefault(key, {}).setdefault(title, defined) != defined:
                    allowed = "definitions that are the same wherever two tools give them one name"
                    raise InvalidInputError("tools", f"two {key}.{title}", allowed)
        properties = {"name": {"enum": [name]}, "parameters": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema
