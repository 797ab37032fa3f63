"""Hypothesis strategies for values that a peer or a client should not send."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from core.wire.numbering import OUTSIDE, add_header

INTS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, -(2**31) - 1]))
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324])
TEXTS = st.one_of(
    st.sampled_from(["", "\x00", "a\nb", 'quote " and \\', "{}", "\u202e", "💥", "x" * 300, "y" * 5000, "stop", "."]),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), INTS, FLOATS, TEXTS, st.binary(max_size=20))


def structures(tags: list[str]) -> st.SearchStrategy[Any]:
    """Nested lists and maps, some with the tag of a message."""
    keys = st.one_of(st.sampled_from(["type", "node_id", "request_id", "updates", "load", "stats", "model"]), TEXTS)
    nested = st.recursive(
        SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)), max_leaves=12
    )
    tagged = st.builds(lambda tag, rest: {**rest, "type": tag}, st.sampled_from(tags), st.dictionaries(keys, nested, max_size=5))
    return st.one_of(nested, tagged)


def payloads(tags: list[str], well_formed: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes that are no message, bytes that may be one, and damaged messages."""
    damaged = st.builds(_damage, well_formed, st.integers(0, 2**30), st.integers(0, 255), st.booleans())
    packed = structures(tags).map(msgspec.msgpack.encode)
    framed = packed.map(lambda payload: add_header(OUTSIDE, payload))
    deep = st.sampled_from(
        [b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    )
    return st.one_of(
        st.binary(max_size=200), packed, framed, damaged, deep, deep.map(lambda payload: add_header(OUTSIDE, payload))
    )


def _damage(payload: bytes, place: int, byte: int, is_cut: bool) -> bytes:
    place %= len(payload)
    return payload[:place] if is_cut else payload[:place] + bytes([byte]) + payload[place + 1 :]
