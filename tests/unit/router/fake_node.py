"""A node in a thread that speaks the real wire and needs no engine: its tokens follow from the prompt and the position alone.

So whatever node serves a request, and wherever it is taken over, the output must be `expected_tokens`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import zmq

from core.stats import EngineStats
from core.step import TokenLogprob
from core.wire.curve import CurveKeys, use_node_keys
from core.wire.messages import (
    Abort,
    AdapterReply,
    AuditReply,
    AuditRequest,
    Generate,
    Heartbeat,
    LoadAdapter,
    ModelInfo,
    NodeLoad,
    NodeMessage,
    Register,
    RegisterAgain,
    RegisterReply,
    RequestUpdate,
    UnloadAdapter,
    Updates,
    decode_router_message,
    encode,
)
from core.wire.numbering import MessageNumbers

BLOCK_SIZE = 4
CACHED_TOKENS_BY_ROLE = {"prefill": 4, "decode": 8}


def expected_tokens(prompt_token_ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What any fake node answers to this prompt."""
    seed = sum((place + 1) * token_id for place, token_id in enumerate(prompt_token_ids))
    return [3 + (seed * 7 + place * 13 + place * place) % (vocab_size - 3) for place in range(num_tokens)]


def model_info(vocab_size: int, max_model_len: int, fingerprint: bytes = b"m" * 16) -> ModelInfo:
    """What all fake nodes of a test serve."""
    return ModelInfo(
        model_name="tiny",
        model_fingerprint=fingerprint,
        layout_fingerprint=b"l" * 16,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        dtype="float32",
    )


def logprob_of(token_id: int, num_top: int, vocab_size: int = 2**31) -> TokenLogprob:
    """Made-up but deterministic logprobs."""
    top = tuple(((token_id + place) % vocab_size, -0.5 - place) for place in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)


@dataclass(slots=True)
class _Running:
    message: Generate
    num_done: int
    is_first: bool = True
    output_token_ids: list[int] = field(default_factory=list)  # of this dispatch


@dataclass
class FakeNode:
    """One node. Behaviour fields may be changed while it runs.

    stop_after: end with finish_reason "stop" after that many output tokens in all. die_after: vanish without a word after having
    sent that many tokens. fail_with: answer every request with this error. is_silent: accept requests and say nothing.
    """

    role: str
    node_id: str
    control_port: int
    model: ModelInfo
    generation: int = 1
    token_delay_s: float = 0.0
    stop_after: int = 0
    die_after: int = 0
    fail_with: str = ""
    adapter_error: str = ""  # why it loads no adapter
    loaded: dict[bytes, str] = field(default_factory=dict)  # folders of adapters by fingerprint
    is_silent: bool = False
    reports_prefill_done: bool = True
    step_age_s: float = 0.0
    has_store: bool = True
    store_complaint: str = ""
    tier_is_reachable: dict[str, int] = field(default_factory=dict)
    connector: str = "none"
    received: list[Generate] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    refusal: str | None = None
    num_tokens_sent: int = 0
    keys: CurveKeys | None = None
    next_logprobs: Callable[[tuple[int, ...]], list[tuple[int, float]]] | None = None

    script: list[int] = field(default_factory=list)  # what every answer is, instead; its last token ends it
    logprob_by_seed: dict[int, float] = field(default_factory=dict)  # of each token; -0.5 for other seeds

    def __post_init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._registration_index = 0
        self._numbers = MessageNumbers(0)
        self._must_end = threading.Event()
        self._is_registered = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, wait: bool = True) -> FakeNode:
        """Connect, register, and return once the router has answered."""
        self._thread.start()
        assert not wait or self._is_registered.wait(5), "the router did not answer to Register"
        return self

    def kill(self) -> None:
        """Close the connection without a word."""
        self._must_end.set()
        self._thread.join(5)

    def has_ended(self) -> bool:
        """Whether it has died, by die_after or kill()."""
        return not self._thread.is_alive()

    def num_running(self) -> int:
        """Requests that it works on."""
        return len(self._running)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, f"{self.node_id}:{self.generation}".encode())
        socket.set(zmq.LINGER, 0)
        use_node_keys(socket, self.keys)
        socket.connect(f"tcp://127.0.0.1:{self.control_port}")
        self._register(socket)
        last_heartbeat_s = 0.0
        while not self._must_end.is_set():
            while socket.poll(0 if self._running and not self.is_silent else 5):
                self._handle(socket, decode_router_message(socket.recv())[1])
            if time.monotonic() - last_heartbeat_s > 0.05:
                last_heartbeat_s = time.monotonic()
                load = NodeLoad(num_running=len(self._running), step_age_s=self.step_age_s)
                stats = EngineStats(num_running=len(self._running), num_generation_tokens=self.num_tokens_sent)
                stats.store_is_reachable = self.has_store
                stats.store_complaint = self.store_complaint
                stats.tier_is_reachable = self.tier_is_reachable
                heartbeat = Heartbeat(node_id=self.node_id, generation=self.generation, load=load, stats=stats)
                self._send(socket, heartbeat)
            if self._running and not self.is_silent:
                self._step(socket)
                time.sleep(self.token_delay_s)
        socket.close(linger=0)
        context.term()

    def _send(self, socket: zmq.Socket, message: NodeMessage) -> None:  # type: ignore[type-arg]
        socket.send(encode(message, self._numbers.next_place()))

    def _register(self, socket: zmq.Socket) -> None:  # type: ignore[type-arg]
        message = Register(
            node_id=self.node_id,
            role=self.role,
            generation=self.generation,
            model=self.model,
            max_num_seqs=8,
            num_blocks=64,
            connector=self.connector,
            registration_index=self._registration_index,
        )
        self._numbers = MessageNumbers(self._registration_index)
        socket.send(encode(message))

    def _handle(self, socket: zmq.Socket, message: object) -> None:  # type: ignore[type-arg]
        match message:
            case RegisterReply():
                self.refusal = message.refusal
                self._is_registered.set()
            case RegisterAgain():
                self._running.clear()
                self.loaded.clear()
                self._registration_index += 1
                self._register(socket)
            case Generate():
                self.received.append(message)
                self._running[message.request_id] = _Running(message, len(message.output_token_ids))
            case Abort():
                self.aborted += message.request_ids
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
            case LoadAdapter():
                if not self.adapter_error:
                    self.loaded[message.fingerprint] = message.path
                self._send(socket, AdapterReply(message.fingerprint, self.adapter_error))
            case UnloadAdapter():
                self.loaded.pop(message.fingerprint, None)
            case AuditRequest():
                counts = {"requests": len(self._running)}
                if message.block_hashes:
                    counts["leading_blocks"] = len(message.block_hashes) - 1
                self._send(socket, AuditReply(audit_id=message.audit_id, node_id=self.node_id, counts=counts, problems=()))

    def _step(self, socket: zmq.Socket) -> None:  # type: ignore[type-arg]
        updates = []
        for request_id, running in list(self._running.items()):
            update = self._next_update(request_id, running)
            updates.append(update)
            if update.finish_reason:
                del self._running[request_id]
        self._send(socket, Updates(tuple(updates)))
        if self.die_after and self.num_tokens_sent >= self.die_after:
            time.sleep(0.05)  # what was sent leaves the process, as with a kill in the middle of a step
            self._must_end.set()

    def _next_update(self, request_id: str, running: _Running) -> RequestUpdate:
        if self.fail_with:
            return RequestUpdate(request_id=request_id, finish_reason="error", error=self.fail_with)
        message, place = running.message, running.num_done
        sampling = message.sampling
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self.script:
            token_id = self.script[place]
        elif self.next_logprobs is not None:
            known = (*message.prompt_token_ids, *message.output_token_ids, *running.output_token_ids)
            ranked = self.next_logprobs(known)
            token_id = ranked[0][0]
            if sampling.logprobs is not None:
                logprobs = (TokenLogprob(token_id, ranked[0][1], 1, tuple(ranked[: sampling.logprobs])),)
        else:
            token_id = expected_tokens(message.prompt_token_ids, place + 1, self.model.vocab_size)[place]
            if sampling.logprobs is not None:
                entry = logprob_of(token_id, sampling.logprobs, self.model.vocab_size)
                logprobs = (replace(entry, logprob=self.logprob_by_seed.get(sampling.seed or 0, entry.logprob)),)
        running.output_token_ids.append(token_id)
        prompt_logprobs = None
        if running.is_first and sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(
                logprob_of(token, sampling.prompt_logprobs, self.model.vocab_size) for token in message.prompt_token_ids[1:]
            )
        finish_reason = ""
        if (self.stop_after and place + 1 >= self.stop_after) or (self.script and place + 1 == len(self.script)):
            finish_reason = "stop"
        elif message.stage == "prefill" or place + 1 >= sampling.max_tokens:
            finish_reason = "length"
        running.num_done += 1
        self.num_tokens_sent += 1
        is_first, running.is_first = running.is_first, False
        return RequestUpdate(
            request_id=request_id,
            first_index=place,
            token_ids=(token_id,),
            finish_reason=finish_reason,
            stop_token_id=token_id if finish_reason == "stop" else None,
            is_prefill_done=message.stage == "prefill" and self.reports_prefill_done,
            num_cached_tokens=min(CACHED_TOKENS_BY_ROLE[self.role], len(message.prompt_token_ids)) if is_first else 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
