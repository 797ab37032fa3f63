"""What nodes say to each other about KV, as bytes: fixed, small, bounded headers. No sockets here.

| magic 4 | version 1 | kind 1 | flags 2 | count 4 | and then, by kind:

A puller begins with HELLO, gets CHALLENGE, sends PROOF, gets WELCOME or REFUSED. Both macs are over the whole of HELLO and
CHALLENGE, each with its sender's role, so that neither a replay nor a reflection passes. Then it asks, and gets one reply each:

LOOKUP   count items: a lease's name (zeros: none), then hashes    FOUND  count bytes, 1 where the hash is here, else 0
PULL     count hashes                                              BLOCKS count leading blocks that are here, header and payload
RENEW, RELEASE  count names of leases                              DONE
SUSPECT  count hashes of blocks that arrived damaged               DONE

Who looks into a node has no layout: its HELLO names ANY_LAYOUT. It may also ask (see visits.py)
DESCRIBE nothing                                                   MEMORY the layout, sizes, number of slots
LIST     nothing                                                   NAMES  count hashes, the next to be evicted first
READ     count hashes                                              COPIES count times a byte 1, header and payload, or a byte 0
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

MAGIC = b"KVTP"
VERSION = 1
ITEM_BYTES = 16
NO_LEASE = bytes(ITEM_BYTES)
ANY_LAYOUT = bytes(16)  # with blocks of no bytes
MAX_ITEMS = 65536  # of a question
MAX_PULLED = 1024  # blocks of a PULL: they are pinned until they are sent
NONCE_BYTES = 32
MAC_BYTES = 32

_HEAD = struct.Struct("<4sBBHI")
HEAD_BYTES = _HEAD.size
_HELLO = struct.Struct("<16sQ32s")  # layout fingerprint, bytes of a block, nonce
_CHALLENGE = struct.Struct("<16s32s")  # of this start of the process, nonce
HELLO_BYTES = HEAD_BYTES + _HELLO.size
CHALLENGE_BYTES = HEAD_BYTES + _CHALLENGE.size + MAC_BYTES
PROOF_BYTES = HEAD_BYTES + MAC_BYTES


class Kind(enum.IntEnum):
    """Of a frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    LOOKUP = 16
    PULL = 17
    RENEW = 18
    RELEASE = 19
    SUSPECT = 20
    DESCRIBE = 21
    LIST = 22
    READ = 23
    FOUND = 32
    BLOCKS = 33
    DONE = 34
    MEMORY = 35
    NAMES = 36
    COPIES = 37


class Refusal(enum.IntEnum):
    """Why a connection is refused: the count of a REFUSED frame."""

    VERSION = 1
    SECRET = 2
    LAYOUT = 3


REFUSAL_TEXTS = {
    Refusal.VERSION: "it speaks another version of the protocol",
    Refusal.SECRET: "it has another secret (security.keys, or the option key_file)",
    Refusal.LAYOUT: "it serves another model: its KV has another layout",
}


@dataclass(frozen=True, slots=True)
class EndPoint:
    """What an end must have in common with the other: the secret (b"": none, for loopback) and the layout of blocks.

    process_id: 16 random bytes of this start of the process.
    """

    secret: bytes = field(repr=False)
    layout_fingerprint: bytes
    block_bytes: int
    process_id: bytes


def pack_head(kind: Kind, count: int = 0) -> bytes:
    """The beginning of a frame."""
    return _HEAD.pack(MAGIC, VERSION, kind, 0, count)


def parse_head(head: bytes, expected: Kind | None = None) -> tuple[Kind, int]:
    """Kind and count. Raises ConnectionError, also when a frame of the expected kind turns out to be a refusal or another."""
    magic, version, number, _flags, count = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ConnectionError("what it sends is not this protocol")
    if number == Kind.REFUSED:  # its place is the same in all versions
        raise ConnectionError(REFUSAL_TEXTS.get(count, "it refuses the connection"))
    if version != VERSION:
        raise VersionError(f"it speaks version {version} of the protocol, this process version {VERSION}")
    try:
        kind = Kind(number)
    except ValueError as error:
        raise ConnectionError(f"a frame of unknown kind {number}") from error
    if expected is not None and kind is not expected:
        raise ConnectionError(f"expected {expected.name}, got {kind.name}")
    return kind, count


class VersionError(ConnectionError):
    """The other end speaks another version."""


def pack_question(kind: Kind, items: Sequence[bytes]) -> bytes:
    """A question of 16-byte items."""
    return pack_head(kind, len(items)) + b"".join(items)


def split_items(payload: bytes) -> list[bytes]:
    """The items of a question."""
    return [payload[start : start + ITEM_BYTES] for start in range(0, len(payload), ITEM_BYTES)]


# -- the handshake ----------------------------------------------------------------------------------------------------------
def pack_hello(end: EndPoint, nonce: bytes) -> bytes:
    """A puller's first frame."""
    return pack_head(Kind.HELLO) + _HELLO.pack(end.layout_fingerprint, end.block_bytes, nonce)


def is_same_layout(hello: bytes, end: EndPoint) -> bool:
    """Whether a HELLO's sender has blocks like ours, or wants to see what ours are like."""
    fingerprint, block_bytes, _nonce = _HELLO.unpack(hello[HEAD_BYTES:])
    return (fingerprint, block_bytes) in ((end.layout_fingerprint, end.block_bytes), (ANY_LAYOUT, 0))


def pack_challenge(end: EndPoint, hello: bytes, nonce: bytes) -> bytes:
    """A source's answer, by which it proves that it has the secret."""
    challenge = pack_head(Kind.CHALLENGE) + _CHALLENGE.pack(end.process_id, nonce)
    return challenge + _mac(end.secret, b"source", hello + challenge)


def check_challenge(end: EndPoint, hello: bytes, challenge: bytes) -> bytes:
    """The source's process_id. Raises ConnectionError when it has not our secret."""
    mac = _mac(end.secret, b"source", hello + challenge[:-MAC_BYTES])
    if not hmac.compare_digest(mac, challenge[-MAC_BYTES:]):
        raise ConnectionError(REFUSAL_TEXTS[Refusal.SECRET])
    process_id: bytes = _CHALLENGE.unpack(challenge[HEAD_BYTES:-MAC_BYTES])[0]
    return process_id


def pack_proof(end: EndPoint, hello: bytes, challenge: bytes) -> bytes:
    """A puller's second frame, by which it proves that it has the secret."""
    return pack_head(Kind.PROOF) + _mac(end.secret, b"puller", hello + challenge)


def is_proof(end: EndPoint, hello: bytes, challenge: bytes, proof: bytes) -> bool:
    """Whether a PROOF is right."""
    return hmac.compare_digest(_mac(end.secret, b"puller", hello + challenge), proof[HEAD_BYTES:])


def _mac(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, b"kvrelay tcp 1|" + role + b"|" + transcript, hashlib.sha256).digest()
