"""Calls in what models write: every format, every way to cut the text, and text that is no call or means no good."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import TOOL_CALL_PARSERS
from router.tool_call_parser import FORMATS, REQUIRED_FORMAT, ToolCallFormat, guess_format
from router.tool_calls import ToolCallReader, ToolUse

LAYOUTS = {**FORMATS, "required": REQUIRED_FORMAT, "named": ToolCallFormat(name="get_weather")}
PARIS = {"name": "get_weather", "arguments": {"city": 'Paris " } ] \\ 🌧', "days": [1, {"a": None}]}}
ROME = {"name": "f", "arguments": {}}


def hermes(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def llama(*calls: dict[str, Any]) -> str:
    return "; ".join(json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in calls)


def read(
    name: str, pieces: list[str], *, is_parallel: bool = True
) -> tuple[str, list[tuple[str, str]], str, list[tuple[str, str]]]:
    """(content, calls) as a stream tells them and as the whole has them: calls are (name, arguments)."""
    reader = ToolCallReader(ToolUse([], LAYOUTS[name], is_parallel, False))
    content, ids = "", []
    calls: dict[int, list[str]] = {}
    for number, piece in enumerate(pieces):
        text, grown = reader.push(piece, is_last=number == len(pieces) - 1)
        content += text
        for call in grown:
            if call.index not in calls:
                assert call.name and call.call_id, "a call begins with its name and id"
                calls[call.index] = [call.name, ""]
                ids.append(call.call_id)
            else:
                assert call.name is None and call.call_id is None
            calls[call.index][1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    assert len(set(ids)) == len(ids)
    whole_content, whole_calls = reader.whole()
    streamed = [(name, arguments) for name, arguments in calls.values()]
    return content, streamed, whole_content, [(call.name or "", call.arguments) for call in whole_calls]


def parsed(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]


CALLS: list[tuple[str, str, str, list[dict[str, Any]]]] = [
    ("hermes", hermes(PARIS), "", [PARIS]),
    ("hermes", f"Let me look. {hermes(PARIS, ROME)}\n", "Let me look. ", [PARIS, ROME]),
    ("hermes", f"\n\n{hermes(PARIS)}\n\nDone.", "Done.", [PARIS]),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": 1}, "id": 3, "name": "late"}</tool_call>',
        "",
        [{"name": "late", "arguments": {"x": 1}}],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [ROME]),
    ("llama3_json", llama(PARIS), "", [PARIS]),
    ("llama3_json", f" <|python_tag|> {llama(PARIS, ROME)}", "", [PARIS, ROME]),
    ("llama3_json", f"Sure: <|python_tag|>{llama(ROME)}", "Sure: ", [ROME]),
    ("mistral", f"[TOOL_CALLS]{json.dumps([PARIS, ROME])}", "", [PARIS, ROME]),
    ("mistral", f"[TOOL_CALLS] {json.dumps(PARIS)}", "", [PARIS]),
    ("mistral", f"Well.[TOOL_CALLS]get_weather{json.dumps(PARIS['arguments'])}[TOOL_CALLS]f[ARGS]{{}}", "Well.", [PARIS, ROME]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "", [ROME]),
    ("required", json.dumps([{"name": "f", "parameters": {}}, PARIS]), "", [ROME, PARIS]),
    ("named", json.dumps(PARIS["arguments"]), "", [PARIS]),
]
NO_CALLS = [
    ("hermes", "Nothing to call."),
    ("hermes", "  \n "),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_cal"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{name: 'f'}</tool_call> and more"),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", "{x} is a set, [y] a list"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]hello world, this is " + "no call " * 60 + "{}"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("required", "[]"),
    ("named", "no object"),
]
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", 'Well <tool_call>{"name": "f", "arguments": {"a": [1, 2'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100 + "1" + "}" * 100 + "}</tool_call>"),
    ("llama3_json", '{"name": "f", "parameters": {"a": ]}} rest'),
    ("mistral", '[TOOL_CALLS]f{"a": nothing}'),
    ("named", '{"a": 1'),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_reader_calls_of_every_format_are_found(name: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    streamed_content, streamed, whole_content, whole = read(name, [text])
    assert (streamed_content, parsed(streamed)) == (content, calls)
    assert (whole_content, parsed(whole)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_reader_text_that_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    assert read(name, [text]) == (text, [], text, [])


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_reader_call_that_breaks_in_its_arguments_is_content_of_the_whole(name: str, text: str) -> None:
    _, streamed, content, calls = read(name, [text])
    assert (content, calls) == (text, [])
    assert len(streamed) == 1, "its beginning was told already"


@pytest.mark.parametrize(("name", "text"), [*((name, text) for name, text, _, _ in CALLS), *NO_CALLS, *BROKEN])
def test_reader_text_cut_anywhere_reads_as_in_one_piece(name: str, text: str) -> None:
    expected = read(name, [text])
    for place in range(1, len(text)):
        assert read(name, [text[:place], text[place:]]) == expected, place
    assert read(name, list(text)) == expected


FRAGMENTS = st.sampled_from(
    [
        *('{"name": "f", "arguments": {', '"name"', ":", '"f"', ",", "{", "}", "[", "]", '"', "\\", "1", " ", "\n", "text", ";"),
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "}}</tool_call>",
            '"parameters": {',
            "<tool",
        ),
    ]
)


@given(name=st.sampled_from(sorted(LAYOUTS)), fragments=st.lists(FRAGMENTS, max_size=24), data=st.data())
@settings(max_examples=400, deadline=None)
def test_reader_any_text_in_any_pieces_reads_as_in_one_piece(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    for _, arguments in whole[3]:
        assert isinstance(json.loads(arguments), dict)


def test_reader_one_call_only_drops_the_others() -> None:
    content, streamed, _, whole = read("hermes", [hermes(PARIS, ROME)], is_parallel=False)
    assert (content, parsed(streamed), parsed(whole)) == ("", [PARIS], [PARIS])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" * 20_000),
        ("hermes", "<tool_call>{" + '"a":[' * 40_000),
        ("hermes", '<tool_call>{"name":"f","arguments":{"x":"' + "a" * 200_000),
        ("hermes", '<tool_call>{"' + "k" * 200_000),
        ("hermes", hermes(*[ROME] * 3000)),
        ("llama3_json", " " * 200_000),
        ("llama3_json", "{" * 200_000),
        ("mistral", "[TOOL_CALLS]" + "a" * 200_000),
        ("required", json.dumps([{"name": "f", "parameters": {"a": [[]] * 1000}}] * 40)),
    ],
)
def test_reader_hostile_text_token_by_token_takes_linear_time(name: str, text: str) -> None:
    def measure(length: int) -> float:
        pieces = [text[start : start + 8] for start in range(0, length, 8)]
        started_s = time.perf_counter()
        read(name, pieces)
        return time.perf_counter() - started_s

    quarter = min(measure(len(text) // 4) for _ in range(2))
    assert measure(len(text)) < 12 * quarter + 0.2, "four times the text may take about four times the time"


def test_formats_are_those_that_the_configuration_knows() -> None:
    assert tuple(FORMATS) == TOOL_CALL_PARSERS


def test_guess_format_by_what_templates_write() -> None:
    assert guess_format("{{ '<tool_call>' }}") == "hermes"
    assert guess_format("<tool_call><function=") == ""
    assert guess_format("[TOOL_CALLS]") == "mistral"
    assert guess_format("<|start_header_id|>ipython") == "llama3_json"
    assert guess_format("plain") == ""
