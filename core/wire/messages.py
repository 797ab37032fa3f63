"""Control messages between router and nodes: frozen, tagged structs of plain values. KV bytes never travel here.

Fields are only added, at the end, with defaults; CHANGELOG.md has a line for every change. Two pairs of functions turn them
into bytes and back, and reject what is no message.
"""

from __future__ import annotations

import msgspec

from core.errors import WireError
from core.sampling_params import SamplingParams
from core.stats import EngineStats
from core.step import TokenLogprob
from core.wire.numbering import OUTSIDE, PROTOCOL_VERSION, Place, add_header, split_header


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node serves. Nodes of one cluster must agree in all of it; the router refuses one that does not.

    Fingerprints are 16 bytes (see core.kv.hashing.Namespace). max_model_len in tokens, prompt and output together.
    """

    model_name: str
    model_fingerprint: bytes
    layout_fingerprint: bytes
    block_size: int
    max_model_len: int
    vocab_size: int
    dtype: str


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A node's load at one moment. num_waiting_tokens: prompt tokens queued and not yet computed."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    step_age_s: float = 0.0  # since the step thread last finished a step or looked for work: large means it is stuck


# -- node to router ----------------------------------------------------------------------------------------------------
class Register(msgspec.Struct, tag="register", frozen=True, kw_only=True):
    """First message of a node, repeated until it is answered, and sent anew when the router asks or the connection broke.

    generation differs for every start of a node's process; registration_index counts its registrations: a new one says that
    the node has dropped all requests, the same one again says nothing new.
    """

    node_id: str
    role: str  # "prefill" or "decode"
    generation: int
    model: ModelInfo
    max_num_seqs: int
    num_blocks: int
    connector: str
    metrics_address: str = ""
    protocol_version: int = PROTOCOL_VERSION
    registration_index: int = 0


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True, kw_only=True):
    """Sent at a fixed interval by the node's I/O thread; stats are cumulative since the node's start."""

    node_id: str
    generation: int
    load: NodeLoad
    stats: EngineStats
    is_draining: bool = False


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of one dispatched request.

    first_index: position of token_ids[0] among the request's output tokens, so that a repeated or late update is recognized.
    finish_reason: "" while running, else stop, length, abort or error. stop_token_id: the stop id that ended it, if one did.
    is_prefill_done: the prompt's full blocks are visible in the store (prefill stage only; may come after finish_reason).
    """

    request_id: str
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    error: str = ""
    is_prefill_done: bool = False
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Updates(msgspec.Struct, tag="updates", frozen=True):
    """All news of one engine step."""

    updates: tuple[RequestUpdate, ...]


class AuditReply(msgspec.Struct, tag="audit_reply", frozen=True, kw_only=True):
    """What the node still holds; see EngineCore.audit for the counts' names."""

    audit_id: int
    node_id: str
    counts: dict[str, int]
    problems: tuple[str, ...]


# -- router to node ----------------------------------------------------------------------------------------------------
class RegisterReply(msgspec.Struct, tag="register_reply", frozen=True):
    """Answer to Register: refusal is empty when accepted, else it says why, and the node ends with that message.

    registration_index: of the Register that is answered; an answer to an earlier one is void.
    """

    refusal: str = ""
    heartbeat_interval_s: float = 0.5
    registration_index: int = 0


class RegisterAgain(msgspec.Struct, tag="register_again", frozen=True):
    """The router does not know this node (any more): it drops all requests it has and registers anew."""


class Generate(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """Dispatch of a request.

    request_id is unique per dispatch: a retry gets a new one. stage "prefill": compute the prompt, sample one token, save the
    blocks, report is_prefill_done. stage "decode": go on from prompt + output tokens to the end. time_left_s: until the
    request's deadline.
    """

    request_id: str
    stage: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    time_left_s: float
    priority: int = 0
    cache_salt: str = ""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Forget these requests; no update follows. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


class AuditRequest(msgspec.Struct, tag="audit_request", frozen=True):
    """Ask for an AuditReply with the same audit_id."""

    audit_id: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Take no new requests; finish what runs; then exit."""


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Asks for nothing. Sending it tells the sender whether the connection still exists; sent after every heartbeat, it tells
    the node by its number whether something before it was lost."""


NodeMessage = Register | Heartbeat | Updates | AuditReply
RouterMessage = RegisterReply | RegisterAgain | Generate | Abort | AuditRequest | Drain | Ping

_encoder = msgspec.msgpack.Encoder()
_node_decoder = msgspec.msgpack.Decoder(NodeMessage)
_router_decoder = msgspec.msgpack.Decoder(RouterMessage)


def encode(message: NodeMessage | RouterMessage, place: Place = OUTSIDE) -> bytes:
    """Message to frame."""
    return add_header(place, _encoder.encode(message))


def decode_node_message(frame: bytes) -> tuple[Place, NodeMessage]:
    """Frame from a node to a message. Raises WireError, whatever the bytes are."""
    place, payload = split_header(frame)
    try:
        return place, _node_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a message of a node (protocol {PROTOCOL_VERSION}): {error}") from error


def decode_router_message(frame: bytes) -> tuple[Place, RouterMessage]:
    """Frame from the router to a message. Raises WireError, whatever the bytes are."""
    place, payload = split_header(frame)
    try:
        return place, _router_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a message of the router (protocol {PROTOCOL_VERSION}): {error}") from error
