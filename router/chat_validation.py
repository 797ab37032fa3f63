"""What a chat template may be given: messages, tool calls in them and variables, each checked once, here.

Every refusal is an InvalidInputError that names field, value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import InvalidInputError
from router.openai_protocol import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_NAME_CHARS = 256
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024
MAX_NESTING = 16  # of what a chat template is given


def num_content_chars(message: ChatMessage) -> int:
    """Characters that a message adds to a prompt, at least one for the message itself."""
    content = message.content
    num_chars = 1 + (sum(1 + len(part.text or "") for part in content) if isinstance(content, list) else len(content or ""))
    if message.tool_calls is not None:
        num_chars += num_json_bytes(message.tool_calls, "messages.tool_calls")
    return num_chars + len(message.reasoning_content or "") + len(message.name or "") + len(message.tool_call_id or "")


def check_messages(messages: Sequence[ChatMessage], max_model_len: int) -> None:
    """Raise InvalidInputError for what no chat template can be given."""
    if not messages:
        raise InvalidInputError("messages", [], "at least one message")
    if len(messages) > max_model_len:
        allowed = f"at most {max_model_len}, the tokens of the model's context"
        raise InvalidInputError("messages", f"{len(messages)} messages", allowed)
    for place, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidInputError(f"messages[{place}].role", message.role, f"one of {', '.join(ROLES)}")
        if message.content is None and not message.tool_calls:
            raise InvalidInputError(f"messages[{place}].content", None, "a text or a list of text parts")
        for name in ("name", "tool_call_id"):
            if len(getattr(message, name) or "") > MAX_NAME_CHARS:
                given = f"{len(getattr(message, name))} characters"
                raise InvalidInputError(f"messages[{place}].{name}", given, f"at most {MAX_NAME_CHARS} characters")
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text" or part.text is None:
                raise InvalidInputError(f"messages[{place}].content[{number}].type", part.type, "text, with its text")


def check_template_kwargs(kwargs: dict[str, object] | None) -> None:
    """Raise InvalidInputError for variables of a chat template that are too large or too deep."""
    if kwargs is None:
        return
    if (num_bytes := num_json_bytes(kwargs, "chat_template_kwargs")) > MAX_TEMPLATE_KWARGS_BYTES:
        allowed = f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes as JSON"
        raise InvalidInputError("chat_template_kwargs", f"{num_bytes} bytes", allowed)
    check_nesting(kwargs, "chat_template_kwargs")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates want them: content is one string, text parts joined by line breaks, arguments of calls are objects.

    Raises InvalidInputError for calls that are nested too deep. Their size was checked before.
    """
    plain = []
    for place, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        entry: dict[str, Any] = {"role": message.role, "content": content or ""}
        for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        if message.tool_calls is not None:
            entry["tool_calls"] = [_with_object(call) for call in message.tool_calls]
            check_nesting(entry["tool_calls"], f"messages[{place}].tool_calls")
        plain.append(entry)
    return plain


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, where they are one written as text, as the API has them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, UnicodeError):
        return call
    except RecursionError:
        raise _too_deep("messages.tool_calls.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def num_json_bytes(value: object, field: str) -> int:
    """Size as JSON. Raises InvalidInputError when it is nested too deep for that."""
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        raise _too_deep(field) from None


def check_nesting(value: object, field: str, most: int = MAX_NESTING) -> None:
    """Raise InvalidInputError when more than `most` levels are nested.

    Without recursion; looks through all of the value, so that its size must be bounded before.
    """
    level: list[object] = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _too_deep(field, most)


def _too_deep(field: str, most: int = MAX_NESTING) -> InvalidInputError:
    return InvalidInputError(field, f"more than {most} levels", f"at most {most} levels of nesting")
