"""Beam search and best_of over HTTP: fake nodes that speak a tiny language, and a plain search in it as the reference."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.router.running_router import RunningRouter
from tests.unit.router.test_http_adapters import load as load_adapter
from tests.unit.router.test_http_adapters import unload as unload_adapter
from tests.unit.router.test_http_adapters import write_adapter
from tests.unit.router.tiny_language import search_plainly, tiny_language

NUM_WORDS = 40  # of the language; the model's vocabulary is larger
LANGUAGE = tiny_language(7, NUM_WORDS)
PROMPT = list(range(3, 23))
EOS = (0, 2)
BEAMS: dict[str, Any] = {"use_beam_search": True, "return_token_ids": True}


class BeamRouter(RunningRouter):
    """A router whose model ends generations with EOS, and whose nodes speak LANGUAGE."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.model = dataclasses.replace(self.model, eos_token_ids=EOS)

    def complete(self, timeout_s: float = 20, **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": PROMPT, **body}, timeout=timeout_s)

    def wait_idle(self) -> None:
        """Until no request is in flight."""
        wait_until(lambda: self.dispatcher.core.num_in_flight == 0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def router(model_folder: Path) -> Iterator[BeamRouter]:
    with BeamRouter(model_folder, max_choices=8) as running:
        for role in ("prefill", "prefill", "decode", "decode"):
            running.add_node(role, next_logprobs=LANGUAGE)
        yield running


def plain_tokens(prompt: list[int] = PROMPT, **keywords: Any) -> list[list[int]]:
    """Output tokens of the plain search, without the eos that ended them."""
    found = search_plainly(LANGUAGE, prompt, eos_token_ids=EOS, **keywords)
    return [list(tokens[:-1] if tokens[-1] in EOS and not keywords.get("ignore_eos") else tokens) for tokens, _ in found]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_over_nodes_are_what_a_plain_search_finds(router: BeamRouter, width: int, length_penalty: float) -> None:
    answer = router.complete(n=width, max_tokens=8, length_penalty=length_penalty, **BEAMS).json()
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == plain_tokens(width=width, max_tokens=8, length_penalty=length_penalty)
    assert [choice["index"] for choice in answer["choices"]] == list(range(width))
    assert [choice["text"] for choice in answer["choices"]] == [
        router.tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in tokens
    ]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == sum(map(len, tokens))


def test_beams_of_several_prompts_ignoring_eos_are_each_its_own_search(router: BeamRouter) -> None:
    prompts = [PROMPT, [9, 8, 7]]
    answer = router.complete(prompt=prompts, n=2, max_tokens=6, ignore_eos=True, **BEAMS).json()
    expected = [plain_tokens(prompt, width=2, max_tokens=6, ignore_eos=True) for prompt in prompts]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected[0] + expected[1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_beams_best_of_is_the_width_and_n_of_them_are_answered(router: BeamRouter) -> None:
    answer = router.complete(n=1, best_of=4, max_tokens=8, logprobs=2, include_stop_str_in_output=True, **BEAMS).json()
    expected = search_plainly(LANGUAGE, PROMPT, width=4, max_tokens=8, eos_token_ids=EOS)[0]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(expected[0])
    assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(expected[1])
    assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])


def test_beams_in_a_chat_are_choices(router: BeamRouter) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4, "use_beam_search": True}
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=10).json()
    assert len(answer["choices"]) == 2
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])


def test_beams_compute_the_prompt_at_one_prefill_node_and_go_on_at_one_decode_node(router: BeamRouter) -> None:
    num_before = {node.node_id: len(node.received) for node in router.nodes}
    router.complete(n=4, max_tokens=6, ignore_eos=True, **BEAMS)
    received = {node.node_id: node.received[num_before[node.node_id] :] for node in router.nodes}
    counts = sorted((node.role, len(received[node.node_id])) for node in router.nodes)
    # Of the second step, one beam is known from the request that brought the prompt to the decode node.
    assert counts == [("decode", 0), ("decode", 1 + 3 + 4 * 4), ("prefill", 0), ("prefill", 1)]


def test_choices_of_a_prompt_go_to_one_prefill_and_one_decode_node(router: BeamRouter) -> None:
    num_before = {node.node_id: len(node.received) for node in router.nodes}
    assert router.complete(n=4, max_tokens=3).status_code == 200
    counts = sorted((node.role, len(node.received) - num_before[node.node_id]) for node in router.nodes)
    assert counts == [("decode", 0), ("decode", 4), ("prefill", 0), ("prefill", 4)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"n": 9}, "n"),  # max_choices
        ({"n": 1, "best_of": 9}, "best_of"),
        ({"prompt": [[1, 2]] * 5, "n": 2}, "prompt"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"stop": "x"}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"max_tokens": 10_000}, "max_tokens"),
    ],
)
def test_beams_with_what_they_cannot_have_are_refused_by_name(router: BeamRouter, body: dict[str, Any], field: str) -> None:
    answer = router.complete(**{"use_beam_search": True, "max_tokens": 4, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field and "allowed" in error["message"]


def test_beams_go_on_when_their_decode_node_dies(model_folder: Path) -> None:
    with BeamRouter(model_folder) as running:
        running.add_node("decode", next_logprobs=LANGUAGE, die_after=12)
        running.add_node("decode", next_logprobs=LANGUAGE, die_after=12)
        running.add_node("decode", "survivor", next_logprobs=LANGUAGE)
        answer = running.complete(n=3, max_tokens=12, **BEAMS).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == plain_tokens(width=3, max_tokens=12)
        assert sum(node.has_ended() for node in running.nodes) >= 1


def test_beams_of_a_client_that_left_are_cancelled(model_folder: Path) -> None:
    with BeamRouter(model_folder) as running:
        node = running.add_node("decode", next_logprobs=LANGUAGE, token_delay_s=0.02)
        with pytest.raises(httpx.ReadTimeout):
            running.complete(timeout_s=0.3, n=2, max_tokens=200, ignore_eos=True, **BEAMS)
        num_received = -1
        while num_received < len(node.received):  # some steps may have been under way
            num_received = len(node.received)
            time.sleep(0.3)
        assert num_received < 2 * 100
        assert running.dispatcher.core.num_in_flight == 0


def test_beams_of_an_adapter_keep_it_when_it_is_unloaded_between_two_steps(model_folder: Path, tmp_path: Path) -> None:
    with BeamRouter(model_folder, allow_runtime_lora_updating=True) as running, ThreadPoolExecutor(1) as pool:
        node = running.add_node("decode", next_logprobs=LANGUAGE, token_delay_s=0.02)
        assert load_adapter(running, "sql", write_adapter(tmp_path / "adapter", b"weights")).status_code == 200
        answer = pool.submit(running.complete, 60, model="sql", n=2, max_tokens=150, ignore_eos=True, **BEAMS)
        wait_until(lambda: len(node.received) >= 4)
        assert unload_adapter(running, "sql").status_code == 200
        num_received = len(node.received)
        wait_until(lambda: len(node.received) >= num_received + 8)  # several steps later
        assert node.loaded
        assert answer.result().status_code == 200
        wait_until(lambda: not node.loaded)
        assert {message.adapter_name for message in node.received} == {"sql"}


def test_beams_that_take_too_long_end_with_a_504(model_folder: Path) -> None:
    with BeamRouter(model_folder, request_timeout_s=0.5) as running:
        running.add_node("decode", next_logprobs=LANGUAGE, token_delay_s=0.02)
        answer = running.complete(n=2, max_tokens=200, ignore_eos=True, **BEAMS)
        assert answer.status_code == 504
        assert "0.5 s" in answer.json()["error"]["message"]
        running.wait_idle()


def test_beams_without_room_for_all_of_them_are_refused_before_they_begin(model_folder: Path) -> None:
    with BeamRouter(model_folder, max_num_requests=5) as running:
        node = running.add_node("decode", next_logprobs=LANGUAGE, is_silent=True)
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as first:
            body = b'{"prompt": [5, 6, 7], "n": 3, "use_beam_search": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            first.sendall(head % len(body) + body)
            wait_until(lambda: node.num_running() == 1)
            refused = running.complete(n=3, use_beam_search=True)
            assert refused.status_code == 429
        running.wait_idle()
        node.is_silent = False
        assert running.complete(n=3, max_tokens=4, use_beam_search=True).status_code == 200, "the room is free again"


def test_best_of_answers_the_likeliest_per_token_and_counts_all(model_folder: Path) -> None:
    with BeamRouter(model_folder) as running:
        node = running.add_node("decode")
        node.logprob_by_seed = {40: -3.0, 41: -0.5, 42: -1.0, 43: -2.0}
        body: dict[str, Any] = {"n": 2, "best_of": 4, "seed": 40, "max_tokens": 3}
        shown = running.complete(**body, logprobs=0).json()
        assert [choice["index"] for choice in shown["choices"]] == [0, 1]
        assert [choice["logprobs"]["token_logprobs"] for choice in shown["choices"]] == [[-0.5] * 3, [-1.0] * 3]
        assert shown["usage"]["completion_tokens"] == 12
        hidden = running.complete(**body).json()
        assert [choice["logprobs"] for choice in hidden["choices"]] == [None, None]
        assert all(message.sampling.logprobs == 0 for message in node.received)
