"""Forced calls: whatever the grammar of a tool_choice lets a model write is read as calls with fitting arguments."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from core.grammar import GrammarMatcher
from core.grammar_compiler import LlgCompiler
from router.openai_protocol import ChatMessage, ChatRequest
from router.tokenizer import Tokenizer
from router.tool_calls import ToolCallReader, ToolSupport, ToolUse, plan_tools

EOS = 2
PLACE = {"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"], "additionalProperties": False}
GO: dict[str, Any] = {
    "type": "object",
    "$defs": {"place": PLACE},
    "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}, "why": {"type": "string", "maxLength": 2}},
    "required": ["from", "to", "why"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"go": GO, "stop": NOTHING}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def compiler(model_folder: Path, tokenizer: Tokenizer) -> Iterator[LlgCompiler]:
    made = LlgCompiler(model_folder, tokenizer.vocab_size, (EOS,))
    yield made
    made.close()


def forced(choice: Any, **more: Any) -> ToolUse:
    request = ChatRequest(messages=[ChatMessage("user", "hi")], tools=TOOLS, tool_choice=choice, **more)
    use = plan_tools(request, ToolSupport(True, "hermes"))
    assert use is not None and use.grammar is not None
    return use


def write_anything(compiler: LlgCompiler, use: ToolUse, source: random.Random) -> list[int]:
    """Tokens drawn evenly from what the grammar allows, to an end; ends are taken when they can be."""
    assert use.grammar is not None
    pending, matcher = compiler.start(use.grammar.source, []), None
    deadline_s = time.monotonic() + 30
    while matcher is None:
        assert time.monotonic() < deadline_s
        matcher = pending.poll()
        time.sleep(0.001)
    return _walk(matcher, source)


def _walk(matcher: GrammarMatcher, source: random.Random) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < 600:
        mask = matcher.token_masks([])[0]
        allowed = [index for index in range(len(mask) * 8) if mask[index // 8] >> index % 8 & 1]
        token_id = EOS if EOS in allowed else source.choice(allowed)
        assert matcher.accept([token_id])
        if token_id == EOS:
            return tokens
        tokens.append(token_id)
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("choice", ["required", "go", "stop"])
def test_forced_output_of_any_kind_is_read_as_calls_that_fit_their_schemas(
    compiler: LlgCompiler, tokenizer: Tokenizer, choice: str
) -> None:
    use = forced(choice if choice == "required" else {"type": "function", "function": {"name": choice}})
    seen = set()
    for seed in range(12):
        tokens = write_anything(compiler, use, random.Random(seed))
        reader = ToolCallReader(use)
        for char in tokenizer.decode(tokens, skip_special_tokens=True):
            reader.push(char, is_last=False)
        reader.push("", is_last=True)
        content, calls = reader.whole()
        assert content == "" and calls
        for call in calls:
            assert call.name is not None
            seen.add(call.name)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert seen == (set(SCHEMAS) if choice == "required" else {choice})


def test_forced_single_call_is_one(compiler: LlgCompiler, tokenizer: Tokenizer) -> None:
    use = forced("required", parallel_tool_calls=False)
    for seed in range(6):
        text = tokenizer.decode(write_anything(compiler, use, random.Random(seed)), skip_special_tokens=True)
        assert len(json.loads(text)) == 1
