"""Chat messages to a prompt's text, by the model's own Jinja template, sandboxed, with the names that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidInputError, ModelLoadError
from router.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


class ChatTemplate:
    """A compiled template. Rendering is pure; user text is data in it, never template source."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tools_source: str = "") -> None:
        """tools_source: a template of its own for chats with tools. Raises ModelLoadError when a source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = tools_source or source
        try:
            self._template = environment.from_string(source)
            self._tools_template = environment.from_string(self.source)
            names = environment.parse(self.source).find_all(nodes.Name)
            self.has_tools = any(name.name == "tools" and name.ctx == "load" for name in names)  # it can show tools
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidInputError.

        tools: definitions, for a template that has_tools. extra: variables of this template, e.g. enable_thinking.
        """
        for name in extra or ():
            if name in RESERVED_NAMES:
                raise InvalidInputError("chat_template_kwargs", name, f"names other than {', '.join(RESERVED_NAMES)}")
        try:
            return (self._tools_template if tools else self._template).render(
                **{
                    **self._special_tokens,
                    "tools": tools,
                    "documents": None,
                    **(extra or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # whatever a template does with messages that it was not written for
            raise InvalidInputError(
                "messages", [m.get("role") for m in messages], f"what the chat template accepts: {error}"
            ) from error


def load_chat_template(folder: Path, tokenizer: Tokenizer, file: str = "") -> ChatTemplate | None:
    """A file's, else that of a model folder: chat_template.jinja, else tokenizer_config.json's; None for a model without one."""
    path = Path(file) if file else folder / TEMPLATE_FILE
    source: Any = tokenizer.config.get("chat_template")
    tools_source: Any = ""
    if file or path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: {error}") from error
    if isinstance(source, list):  # several named ones
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source, tools_source = by_name.get("default"), by_name.get("tool_use") or ""
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, tokenizer.special_tokens(), str(tools_source))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant wrote, for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
