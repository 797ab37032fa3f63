"""Whatever the router, or who speaks in its place, sends to a node: nothing raises, nothing leaks, honest requests are exact."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import WireError
from core.node_core import NodeCore, NodeIdentity
from core.sampling_params import SamplingParams
from core.wire import messages
from tests.fuzz.examples import num_examples
from tests.fuzz.hostile import FLOATS, INTS, TEXTS, payloads
from tests.support.engine_bench import EngineBench
from tests.support.fake_runner import VOCAB_SIZE, oracle_tokens
from tests.support.memory_connector import MemoryConnector

TAGS = [
    *("register_reply", "register_again", "generate", "abort", "audit", "load_adapter", "unload_adapter", "drain", "ping"),
    "kv_snapshot_request",
]
MAX_MODEL_LEN = 64
TOKEN_IDS = st.one_of(
    st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=30),
    st.lists(INTS, max_size=5),
    st.sampled_from([[], [VOCAB_SIZE], [-1], [1] * MAX_MODEL_LEN, [1] * 5000]),
)


def _mostly(good: Any, hostile: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(good), st.just(good), hostile)


FINGERPRINTS = st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16, b"d" * 16, b"e" * 16])
SAMPLING = st.builds(
    SamplingParams,
    temperature=_mostly(0.0, FLOATS),
    top_p=_mostly(1.0, FLOATS),
    top_k=_mostly(0, INTS),
    min_p=_mostly(0.0, FLOATS),
    seed=_mostly(1, st.none() | INTS),
    max_tokens=st.integers(1, 12) | INTS,
    min_tokens=_mostly(0, INTS),
    stop=_mostly((), st.lists(TEXTS, max_size=20).map(tuple)),
    stop_token_ids=_mostly((), st.lists(INTS, max_size=4).map(tuple)),
    repetition_penalty=_mostly(1.0, FLOATS),
    logit_bias=_mostly({}, st.dictionaries(INTS, FLOATS, max_size=3)),
    logprobs=_mostly(None, INTS),
    prompt_logprobs=_mostly(None, INTS),
)
GENERATES = st.builds(
    messages.Generate,
    request_id=st.sampled_from(["evil-0", "evil-1", "evil-2", "honest-0"]) | TEXTS,
    stage=st.sampled_from(["prefill", "decode", "decode"]) | TEXTS,
    prompt_token_ids=TOKEN_IDS,
    output_token_ids=_mostly([], TOKEN_IDS),
    sampling=SAMPLING,
    time_left_s=_mostly(60.0, FLOATS),
    priority=INTS,
    cache_salt=TEXTS,
    adapter_fingerprint=_mostly(b"", FINGERPRINTS | st.binary(max_size=70)),
)
# An Abort or a RegisterAgain ends honest requests, as it should: who may send one is a matter of authentication.
ABORTS = st.lists(st.sampled_from(["evil-0", "evil-1", "honest-99"]) | TEXTS, max_size=4).map(
    lambda ids: messages.Abort(tuple(ids))
)
OTHERS = st.one_of(
    st.builds(messages.AuditRequest, INTS),
    st.builds(messages.RegisterReply, TEXTS, FLOATS),
    st.just(messages.Ping()),
    st.just(messages.KVSnapshotRequest()),
    st.builds(messages.LoadAdapter, name=TEXTS, fingerprint=FINGERPRINTS, path=TEXTS),
    st.builds(messages.UnloadAdapter, FINGERPRINTS),
)
COMMANDS = st.one_of(GENERATES, GENERATES, ABORTS, OTHERS)
STEPS = st.lists(
    st.one_of(
        st.sampled_from(["honest", "step", "step", "step"]),
        COMMANDS.map(messages.encode),
        payloads(TAGS, COMMANDS.map(messages.encode)),
    ),
    max_size=30,
)


class NodeBench:
    """One node's core over the fake model. `tokens` are those of honest requests."""

    def __init__(self) -> None:
        bench = EngineBench(num_blocks=48, connector=MemoryConnector(), max_model_len=MAX_MODEL_LEN, max_num_waiting=64)
        self.bench = bench
        self.node = NodeCore(NodeIdentity("n", "decode", 1), bench.engine)
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def submit(self) -> None:
        """An honest request."""
        number = len(self.prompts)
        prompt = [3] * 8 + [5 + number] * (number % 7)
        self.prompts[f"honest-{number}"], self.tokens[f"honest-{number}"] = prompt, []
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=6)
        self.feed(
            messages.encode(
                messages.Generate(
                    request_id=f"honest-{number}",
                    stage="decode",
                    prompt_token_ids=prompt,
                    output_token_ids=[],
                    sampling=sampling,
                    time_left_s=1e6,
                )
            )
        )

    def feed(self, payload: bytes) -> None:
        """Bytes from the router."""
        try:
            _, command = messages.decode_router_message(payload)
        except WireError:
            return
        if not isinstance(command, messages.RegisterAgain | messages.Drain):
            self._take(self.node.handle(command))

    def step(self) -> None:
        """One step, and what follows from it."""
        news, _num_tokens = self.node.step()
        self._take(news)
        self.bench.clock.advance(0.01)

    def drain(self) -> None:
        """Everything ends, honest requests with their tokens, and nothing is held."""
        for _ in range(3000):
            if not self.bench.engine.has_work():
                break
            self.step()
        assert self.finished == set(self.prompts)
        for request_id, prompt in self.prompts.items():
            assert self.tokens[request_id] == oracle_tokens(prompt, 6)
        self.bench.assert_nothing_leaked()

    def _take(self, news: list[messages.NodeMessage]) -> None:
        for message in [*news, self.node.heartbeat()]:
            _, decoded = messages.decode_node_message(messages.encode(message))  # what a node says is always a message
            for update in decoded.updates if isinstance(decoded, messages.Updates) else ():
                if update.request_id in self.prompts and update.request_id not in self.finished:
                    assert update.finish_reason in ("", "length"), update
                    self.tokens[update.request_id] += update.token_ids
                    self.finished |= {update.request_id} if update.finish_reason else set()


@given(STEPS)
@settings(max_examples=num_examples(150))
def test_node_core_fed_with_hostile_commands_serves_honest_requests_exactly(steps: list[Any]) -> None:
    bench = NodeBench()
    bench.submit()
    for step in steps:
        if step == "honest":
            bench.submit()
        elif step == "step":
            bench.step()
        else:
            bench.feed(step)
    bench.submit()
    bench.drain()


def test_node_core_deadline_that_is_no_number_does_not_stop_the_others_deadlines() -> None:
    bench = NodeBench()

    def generate(request_id: str, time_left_s: float) -> bytes:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=50)
        return messages.encode(
            messages.Generate(
                request_id=request_id,
                stage="decode",
                prompt_token_ids=[1],
                output_token_ids=[],
                sampling=sampling,
                time_left_s=time_left_s,
            )
        )

    bench.feed(generate("evil-0", float("nan")))
    bench.feed(generate("evil-1", 0.05))
    for _ in range(10):
        bench.step()
    assert not bench.bench.engine.has_request("evil-0") and not bench.bench.engine.has_request("evil-1")


def test_node_core_second_request_with_the_id_of_one_that_runs_changes_nothing() -> None:
    bench = NodeBench()
    bench.submit()
    bench.step()
    again = messages.Generate(
        request_id="honest-0",
        stage="decode",
        prompt_token_ids=[1],
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=3),
        time_left_s=1.0,
    )
    bench.feed(messages.encode(again))
    bench.drain()
