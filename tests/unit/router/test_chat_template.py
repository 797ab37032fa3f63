"""Templates as models bring them: names they expect, faults they raise, and what users may not do to them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from core.errors import InvalidInputError, ModelLoadError
from router.chat_template import ChatTemplate, load_chat_template
from router.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_chat_template_of_the_config_is_rendered(model_folder: Path, tokenizer: Tokenizer) -> None:
    template = load_chat_template(model_folder, tokenizer)
    assert template is not None
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_chat_template_file_wins_over_the_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "chat_template.jinja").write_text("from file")
    template = load_chat_template(tmp_path, tokenizer)
    assert template is not None and template.render(USER) == "from file"


def test_chat_template_named_list_takes_the_default(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    monkeypatch.setattr(tokenizer, "config", {"chat_template": named})
    template = load_chat_template(tmp_path, tokenizer)
    assert template is not None and template.render(USER) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == "tools"


def test_chat_template_of_the_configuration_wins_and_must_be_readable(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "chat_template.jinja").write_text("the model's")
    (tmp_path / "own.jinja").write_text("own")
    template = load_chat_template(tmp_path, tokenizer, str(tmp_path / "own.jinja"))
    assert template is not None and template.render(USER) == "own"
    with pytest.raises(ModelLoadError, match=r"none\.jinja"):
        load_chat_template(tmp_path, tokenizer, str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    ("source", "has_tools"),
    [
        ("{{ messages }}", False),
        ("{# tools #}{{ 'tools' }}{{ message.tools }}", False),
        ("{% if tools is defined and tools %}x{% endif %}", True),
        ("{% if x %}{% set tools = x %}{% endif %}{% if not tools is defined %}{% set tools = none %}{% endif %}", True),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
    ],
)
def test_chat_template_says_whether_it_can_show_tools(source: str, has_tools: bool) -> None:
    assert ChatTemplate(source, {}).has_tools is has_tools


def test_chat_template_absent_is_none(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "config", {})
    assert load_chat_template(tmp_path, tokenizer) is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "hi"),
        ("{{ bos_token }}{{ messages[0]['content'] | tojson }}", '<s>"hi"'),
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", json.dumps([1, 2], indent=1)),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{{ strftime_now('%Y') }}", datetime.now().strftime("%Y")),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ enable_thinking }}", "True"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_chat_template_has_the_names_that_templates_expect(source: str, text: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(USER, extra={"enable_thinking": True}) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_chat_template_fault_is_the_request_s_fault(source: str) -> None:
    with pytest.raises(InvalidInputError, match="messages"):
        ChatTemplate(source, {}).render(USER)


def test_chat_template_user_text_is_never_template_source() -> None:
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"


def test_chat_template_extra_may_not_replace_messages() -> None:
    with pytest.raises(InvalidInputError, match="chat_template_kwargs"):
        ChatTemplate("x", {}).render(USER, extra={"messages": []})


def test_chat_template_syntax_error_is_found_at_load() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% if %}", {})
