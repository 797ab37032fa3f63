"""Control messages between router and nodes: frozen, tagged structs of plain values. KV bytes never travel here.

Fields are only added, at the end, with defaults; CHANGELOG.md has a line for every change. Two pairs of functions turn them
into bytes and back, and reject what is no message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import WireError
from core.sampling_params import SamplingParams
from core.stats import EngineStats
from core.step import TokenLogprob
from core.wire.numbering import OUTSIDE, PROTOCOL_VERSION, Place, add_header, split_header

# What is outside these bounds is no message: decoding refuses it, so that a peer cannot fill the other's memory or logs.
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
Label = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]  # whoever sends free text cuts it to MAX_TEXT_CHARS, lest the message is refused
MAX_TEXT_CHARS = 2000
MAX_KV_SOURCES = 8
Fingerprint = Annotated[bytes, Meta(max_length=64)]
AdapterFingerprint = Annotated[bytes, Meta(min_length=16, max_length=16)]
FolderPath = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
RegistrationIndex = Annotated[int, Meta(ge=0, lt=2**32)]  # of a frame's header
Seconds = Annotated[float, Meta(ge=0)]  # NaN is not at least 0
Address = Annotated[str, Meta(max_length=255, pattern=r"^[!-~]*\Z")]  # HOST:PORT, or ""
BlockHashes = Annotated[tuple[Annotated[bytes, Meta(min_length=16, max_length=16)], ...], Meta(max_length=2**17)]
MAX_EVENT_HASHES = 2**16  # in a message of KV events, of all its events together
MAX_EVENTS = 1024
EventHashes = Annotated[tuple[Annotated[bytes, Meta(min_length=16, max_length=16)], ...], Meta(max_length=MAX_EVENT_HASHES)]
Medium = Annotated[str, Meta(max_length=128, pattern=r"^[!-~]*\Z")]
MAX_COST_MS = 1e9
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_COST_MS)]
Sequence = Annotated[int, Meta(ge=0, le=2**62)]
LEADING_BLOCKS = "leading_blocks"  # a count in AuditReply
TokenIds = tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node serves. Nodes of one cluster must agree in all of it; the router refuses one that does not.

    Fingerprints are 16 bytes (see core.kv.hashing.Namespace). max_model_len in tokens, prompt and output together.
    """

    model_name: Label
    model_fingerprint: Fingerprint
    layout_fingerprint: Fingerprint
    block_size: Size
    max_model_len: Size
    vocab_size: Size
    dtype: Label


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A node's load at one moment. num_waiting_tokens: prompt tokens queued and not yet computed."""

    num_running: Count = 0
    num_waiting: Count = 0
    num_waiting_tokens: Count = 0
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0
    step_age_s: Seconds = 0.0  # since the step thread last finished a step or looked for work: large means it is stuck


class NodeCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node measured of itself while it worked; 0 where nothing is known yet.

    A prefill of n tokens, their positions' sum being a: overhead + n * per_token + a * per_attended. A load of n blocks:
    latency + n * per_block. decode_step_ms: of steps that only decode, lately.
    """

    prefill_overhead_ms: Milliseconds = 0.0
    prefill_ms_per_token: Milliseconds = 0.0
    prefill_ms_per_attended: Milliseconds = 0.0
    load_latency_ms: Milliseconds = 0.0
    load_ms_per_block: Milliseconds = 0.0
    decode_step_ms: Milliseconds = 0.0


# -- node to router ----------------------------------------------------------------------------------------------------
class Register(msgspec.Struct, tag="register", frozen=True, kw_only=True):
    """First message of a node, repeated until it is answered, and sent anew when the router asks or the connection broke.

    generation differs for every start of a node's process; registration_index counts its registrations: a new one says that
    the node has dropped all requests, the same one again says nothing new. kv_address: where other nodes get the KV that
    this one has saved; "" where all share a store.
    """

    node_id: Name
    role: Label  # "prefill" or "decode"
    generation: int
    model: ModelInfo
    max_num_seqs: Size
    num_blocks: Size
    connector: Label
    metrics_address: Address = ""
    protocol_version: int = PROTOCOL_VERSION
    registration_index: RegistrationIndex = 0
    kv_address: Address = ""


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True, kw_only=True):
    """Sent at a fixed interval by the node's I/O thread; stats are cumulative since the node's start."""

    node_id: Name
    generation: int
    load: NodeLoad
    stats: EngineStats
    is_draining: bool = False
    costs: NodeCosts = NodeCosts()


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of one dispatched request.

    first_index: position of token_ids[0] among the request's output tokens, so that a repeated or late update is recognized.
    finish_reason: "" while running, else stop, length, abort or error. stop_token_id: the stop id that ended it, if one did.
    is_prefill_done: the prompt's full blocks are visible in the store (prefill stage only; may come after finish_reason).
    """

    request_id: Text
    first_index: Count = 0
    token_ids: TokenIds = ()
    finish_reason: Text = ""
    stop_token_id: int | None = None
    error: Text = ""
    is_prefill_done: bool = False
    num_cached_tokens: Count = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Updates(msgspec.Struct, tag="updates", frozen=True):
    """All news of one engine step."""

    updates: tuple[RequestUpdate, ...]


class BlockStored(msgspec.Struct, tag="stored", frozen=True):
    """These blocks are there from now on. medium: "" for the node's own pool, else the name of its connector."""

    block_hashes: EventHashes
    medium: Medium = ""


class BlockRemoved(msgspec.Struct, tag="removed", frozen=True):
    """These blocks are no longer there; some may never have been told of."""

    block_hashes: EventHashes
    medium: Medium = ""


class PoolCleared(msgspec.Struct, tag="cleared", frozen=True):
    """The node's own pool holds nothing but what is told from here on."""


KVEvent = BlockStored | BlockRemoved | PoolCleared


class KVEvents(msgspec.Struct, tag="kv_events", frozen=True):
    """What changed in a node's cache, ahead of the news of the step that changed it; only after a KVSnapshotRequest.

    first_sequence: of events[0]; the others follow. The count goes on for the life of the node's process. A message that begins
    with PoolCleared begins anew: it is valid whatever was before.
    """

    first_sequence: Sequence
    events: Annotated[tuple[KVEvent, ...], Meta(max_length=MAX_EVENTS)]


class AuditReply(msgspec.Struct, tag="audit_reply", frozen=True, kw_only=True):
    """What the node still holds; see EngineCore.audit for the counts' names."""

    audit_id: int
    node_id: Name
    counts: Annotated[dict[Name, int], Meta(max_length=64)]
    problems: Annotated[tuple[Text, ...], Meta(max_length=64)]


class AdapterReply(msgspec.Struct, tag="adapter_reply", frozen=True):
    """Outcome of a LoadAdapter. error: why requests for that adapter will fail on this node; "" when it has it."""

    fingerprint: AdapterFingerprint
    error: Text = ""


# -- router to node ----------------------------------------------------------------------------------------------------
class RegisterReply(msgspec.Struct, tag="register_reply", frozen=True):
    """Answer to Register: refusal is empty when accepted, else it says why, and the node ends with that message.

    registration_index: of the Register that is answered; an answer to an earlier one is void.
    """

    refusal: Text = ""
    heartbeat_interval_s: Annotated[float, Meta(ge=0.01, le=3600)] = 0.5
    registration_index: RegistrationIndex = 0


class RegisterAgain(msgspec.Struct, tag="register_again", frozen=True):
    """The router does not know this node (any more): it drops all requests it has and registers anew."""


class Generate(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """Dispatch of a request.

    request_id is unique per dispatch: a retry gets a new one. stage "prefill": compute the prompt, sample one token, save the
    blocks, report is_prefill_done. stage "decode": go on from prompt + output tokens to the end. time_left_s: until the
    request's deadline. kv_sources: kv_address of other nodes that have had this request, as they registered it.
    adapter_fingerprint: of a LoRA adapter that a LoadAdapter told of, b"" for none; adapter_name is for people.
    """

    request_id: Name
    stage: Text
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    time_left_s: float
    priority: int = 0
    cache_salt: str = ""
    kv_sources: Annotated[tuple[Address, ...], Meta(max_length=MAX_KV_SOURCES)] = ()
    adapter_name: Label = ""
    adapter_fingerprint: Fingerprint = b""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Forget these requests; no update follows. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


class AuditRequest(msgspec.Struct, tag="audit_request", frozen=True):
    """Ask for an AuditReply with the same audit_id.

    block_hashes: of a prompt's full blocks; the reply's counts then have LEADING_BLOCKS, how many of the first are in the
    node's own cache.
    """

    audit_id: int
    block_hashes: BlockHashes = ()


class KVSnapshotRequest(msgspec.Struct, tag="kv_snapshot_request", frozen=True):
    """Tell what your cache holds, and every change from then on, with KVEvents. Sent after a registration, and when some were
    lost. Another registration ends it."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, kw_only=True):
    """Requests may name this LoRA adapter from now on: bring it into memory, and answer with an AdapterReply.

    Sent after each registration for all adapters, and when one is added. path: of its folder, from the router's configuration or
    an administrator; what it holds must be what the fingerprint says (core.adapter_files).
    """

    name: Label
    fingerprint: AdapterFingerprint
    path: FolderPath


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """No request will name this adapter any more."""

    fingerprint: AdapterFingerprint


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Take no new requests; finish what runs; then exit."""


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Asks for nothing. Sending it tells the sender whether the connection still exists; sent after every heartbeat, it tells
    the node by its number whether something before it was lost."""


NodeMessage = Register | Heartbeat | Updates | AuditReply | AdapterReply | KVEvents
RouterMessage = (
    RegisterReply
    | RegisterAgain
    | Generate
    | Abort
    | AuditRequest
    | LoadAdapter
    | UnloadAdapter
    | Drain
    | Ping
    | KVSnapshotRequest
)

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
