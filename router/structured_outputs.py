"""From the API's fields to the grammar that a request's output must follow: response_format, structured_outputs, guided_*.

Shapes and sizes are judged here; whether a grammar compiles is grammar_check.py's question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidInputError
from core.sampling_params import MAX_GRAMMAR_CHARS, GrammarSource
from router.openai_protocol import GenerationRequest, ResponseFormat, StructuredOutputs

ANY_OBJECT = b'{"type":"object"}'
# How json.dumps writes: with no choice of whitespace, the tokens between values follow from the schema.
NO_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ONE_OF = "exactly one of json, regex, choice, grammar and json_object"
_RESPONSE_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the field of the request that asked for it: what an error names."""

    field: str
    source: GrammarSource


def requested_grammar(request: GenerationRequest) -> RequestedGrammar | None:
    """The grammar that a request asks for, by whichever field. Raises InvalidInputError, also when two fields ask for one."""
    asked = [grammar for grammar in (_from_response_format(request.response_format), _from_structured(request)) if grammar]
    if len(asked) > 1:
        raise InvalidInputError(asked[1].field, asked[1].source.text, f"absent beside {asked[0].field}: one grammar at most")
    return asked[0] if asked else None


def json_schema_grammar(field: str, schema: dict[str, Any] | bool | bytes, *, any_whitespace: bool = True) -> RequestedGrammar:
    """The grammar of JSON that a schema (a value, or JSON bytes) describes. any_whitespace False: laid out as json.dumps does.

    Raises InvalidInputError that names `field`.
    """
    try:
        value = msgspec.json.decode(schema) if isinstance(schema, bytes) else schema
        if not isinstance(value, dict | bool):
            raise InvalidInputError(field, value, "a JSON schema: an object or a boolean")
        if not any_whitespace:
            value = {**(value if isinstance(value, dict) else {"allOf": [value]}), "x-guidance": NO_WHITESPACE}
        text = msgspec.json.encode(value).decode()
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInputError(field, "a text that is no JSON", f"a JSON schema ({error})") from error
    except RecursionError:
        raise InvalidInputError(field, "JSON nested without end", "JSON that is less deeply nested") from None
    return _checked(field, "json_schema", text)


# -- inside ------------------------------------------------------------------------------------------------------------
def _from_response_format(wanted: ResponseFormat | None) -> RequestedGrammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_schema_grammar("response_format", ANY_OBJECT)
    if wanted.type != "json_schema":
        raise InvalidInputError("response_format.type", wanted.type, f"one of {', '.join(_RESPONSE_FORMATS)}")
    schema = _given(wanted.json_schema.schema) if wanted.json_schema is not None else None
    if schema is None:
        raise InvalidInputError("response_format.json_schema", None, 'an object with its "schema"')
    return json_schema_grammar("response_format.json_schema.schema", schema)


def _from_structured(request: GenerationRequest) -> RequestedGrammar | None:
    """structured_outputs or its older names, of which at most one may be given."""
    wanted: list[tuple[str, StructuredOutputs]] = []
    if request.structured_outputs is not None:
        wanted.append(("structured_outputs", request.structured_outputs))
    if _given(request.guided_json) is not None:
        wanted.append(("guided_json", StructuredOutputs(json=request.guided_json)))
    if request.guided_regex is not None:
        wanted.append(("guided_regex", StructuredOutputs(regex=request.guided_regex)))
    if request.guided_choice is not None:
        wanted.append(("guided_choice", StructuredOutputs(choice=request.guided_choice)))
    if request.guided_grammar is not None:
        wanted.append(("guided_grammar", StructuredOutputs(grammar=request.guided_grammar)))
    if len(wanted) > 1:
        name, value = wanted[1]
        raise InvalidInputError(name, _from_one(name, value).source.text, f"absent beside {wanted[0][0]}: one grammar at most")
    return _from_one(*wanted[0]) if wanted else None


def _from_one(name: str, wanted: StructuredOutputs) -> RequestedGrammar:
    schema = _given(wanted.json)
    given = {
        "json": schema,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": wanted.json_object or None,
    }
    kinds = [kind for kind, value in given.items() if value is not None]
    if len(kinds) != 1:
        raise InvalidInputError(name, ", ".join(kinds), _ONE_OF)
    kind = kinds[0]
    field = f"{name}.{kind}" if name == "structured_outputs" else name
    any_whitespace = not wanted.disable_any_whitespace
    if schema is not None:
        return json_schema_grammar(field, _unquoted(field, schema), any_whitespace=any_whitespace)
    if wanted.json_object:
        return json_schema_grammar(field, ANY_OBJECT, any_whitespace=any_whitespace)
    if wanted.choice is not None:
        if not wanted.choice or not all(wanted.choice):
            raise InvalidInputError(field, wanted.choice, "at least one text, none of them empty")
        return _checked(field, kind, msgspec.json.encode(wanted.choice).decode())
    text = wanted.regex or wanted.grammar
    if not text:
        raise InvalidInputError(field, "", "a text that is not empty")
    return _checked(field, kind, text)


def _given(raw: msgspec.Raw) -> bytes | None:
    """null counts as absent, as everywhere in the API."""
    return None if (text := bytes(raw)) in (b"", b"null") else text


def _unquoted(field: str, schema: bytes) -> bytes:
    """A schema may also be given as a string that holds it."""
    if not schema.startswith(b'"'):
        return schema
    try:
        return msgspec.json.decode(schema, type=str).encode()
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInputError(field, "a text that is no JSON", f"a JSON schema ({error})") from error


def _checked(field: str, kind: str, text: str) -> RequestedGrammar:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidInputError(field, f"{len(text)} characters", f"at most {MAX_GRAMMAR_CHARS} characters")
    return RequestedGrammar(field, GrammarSource(kind, text))
