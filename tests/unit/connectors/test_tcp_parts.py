"""The parts of the tcp connector that need no socket: handshake, memory, leases, options."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, PAGES_LAYOUT, SteppedClock, chain, content_of
from connectors.registry import create_connector
from connectors.stored_block import BlockCheck
from connectors.tcp.block_memory import BlockMemory, slot_bytes
from connectors.tcp.frames import (
    HEAD_BYTES,
    MAC_BYTES,
    EndPoint,
    Kind,
    Refusal,
    VersionError,
    check_challenge,
    is_proof,
    is_same_layout,
    pack_challenge,
    pack_head,
    pack_hello,
    pack_proof,
    parse_head,
)
from connectors.tcp.leases import Leases
from connectors.tcp.options import advertised_address, read_secret, tcp_options
from core.errors import ConfigError
from core.kv.pool_memory import KVPoolMemory

SECRET = b"s" * 32


def end(secret: bytes = SECRET, process: int = 1) -> EndPoint:
    return EndPoint(secret, LAYOUT.fingerprint, LAYOUT.block_bytes, bytes([process]) * 16)


# -- the handshake ----------------------------------------------------------------------------------------------------------
def test_handshake_of_two_with_one_secret_passes_and_names_the_source() -> None:
    hello = pack_hello(end(), b"c" * 32)
    challenge = pack_challenge(end(process=2), hello, b"s" * 32)
    assert check_challenge(end(), hello, challenge) == bytes([2]) * 16
    assert is_proof(end(process=2), hello, challenge, pack_proof(end(), hello, challenge))
    assert is_same_layout(hello, end())


@pytest.mark.parametrize("theirs", [b"", b"t" * 32, SECRET[:-1]])
def test_handshake_with_another_secret_fails_at_both_ends(theirs: bytes) -> None:
    hello = pack_hello(end(), b"c" * 32)
    challenge = pack_challenge(end(theirs), hello, b"s" * 32)
    with pytest.raises(ConnectionError, match="another secret"):
        check_challenge(end(), hello, challenge)
    assert not is_proof(end(), hello, challenge, pack_proof(end(theirs), hello, challenge))


def test_handshake_reflected_or_replayed_fails() -> None:
    hello = pack_hello(end(), b"c" * 32)
    challenge = pack_challenge(end(), hello, b"s" * 32)
    reflected = pack_head(Kind.PROOF) + challenge[-MAC_BYTES:]
    assert not is_proof(end(), hello, challenge, reflected), "the source's own mac is no proof"
    old_proof = pack_proof(end(), hello, challenge)
    new_challenge = pack_challenge(end(), hello, b"n" * 32)
    assert not is_proof(end(), hello, new_challenge, old_proof), "an old proof is none for a new nonce"
    with pytest.raises(ConnectionError):
        check_challenge(end(), pack_hello(end(), b"d" * 32), challenge)


def test_handshake_with_any_changed_byte_fails() -> None:
    hello = pack_hello(end(), b"c" * 32)
    challenge = pack_challenge(end(), hello, b"s" * 32)
    for position in range(HEAD_BYTES, len(challenge)):
        damaged = bytearray(challenge)
        damaged[position] ^= 1
        with pytest.raises(ConnectionError):
            check_challenge(end(), hello, bytes(damaged))


def test_hello_of_another_layout_is_seen() -> None:
    other = EndPoint(SECRET, PAGES_LAYOUT.fingerprint, PAGES_LAYOUT.block_bytes, bytes(16))
    assert not is_same_layout(pack_hello(other, b"c" * 32), end())


def test_end_point_shown_to_people_hides_the_secret() -> None:
    assert "ssss" not in repr(end())


def test_head_of_another_version_and_refusals_say_so() -> None:
    head = bytearray(pack_head(Kind.HELLO))
    head[4] += 1
    with pytest.raises(VersionError, match="version 2"):
        parse_head(bytes(head))
    with pytest.raises(ConnectionError, match="another model"):
        parse_head(pack_head(Kind.REFUSED, Refusal.LAYOUT), Kind.WELCOME)
    with pytest.raises(ConnectionError, match="expected WELCOME"):
        parse_head(pack_head(Kind.DONE), Kind.WELCOME)


# -- memory -----------------------------------------------------------------------------------------------------------------
class Memory:
    """A memory of some blocks, and a pool to copy from and to."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = BlockMemory(LAYOUT, num_blocks * slot_bytes(LAYOUT))
        self.pool = KVPoolMemory(LAYOUT, 1)

    def store(self, *names: bytes, protected: tuple[bytes, ...] = ()) -> list[bool]:
        stored = []
        for name in names:
            self.pool.block(0)[:] = content_of(name)
            slots = self.memory.claim(1, protected)
            for slot in slots:
                self.memory.fill(slot, name, self.pool.block(0))
            stored.append(bool(slots))
        return stored

    def read(self, name: bytes) -> BlockCheck | None:
        slots = self.memory.pin_prefix([name])
        if not slots:
            return None
        check = self.memory.read(slots[0], self.pool.block(0))
        self.memory.unpin(slots)
        assert check is not BlockCheck.OK or bytes(self.pool.block(0)) == content_of(name)
        return check


def test_memory_full_evicts_the_least_recently_used_tail_first() -> None:
    bench = Memory(4)
    first, second, third, *_ = chain(1, 4)
    assert bench.store(first, second, third) == [True] * 3
    bench.memory.touch([first, second, third])
    others = chain(2, 4)
    assert bench.store(*others[:2]) == [True, True]
    assert bench.read(third) is None and bench.read(second) is BlockCheck.OK and bench.read(first) is BlockCheck.OK
    assert bench.memory.num_evictions == 1


def test_memory_pinned_and_protected_blocks_stay() -> None:
    bench = Memory(2)
    first, second, third = chain(1, 3)
    bench.store(first, second)
    slots = bench.memory.pin_prefix([first])
    assert bench.store(third, protected=(second,)) == [False]
    assert bench.store(third) == [True]
    assert first in bench.memory.stored and second not in bench.memory.stored
    bench.memory.unpin(slots)
    assert bench.memory.num_pinned == 0


def test_memory_forgotten_while_pinned_is_freed_when_the_last_pin_goes() -> None:
    bench = Memory(1)
    first, second = chain(1, 2)
    bench.store(first)
    slots = bench.memory.pin_prefix([first, second])
    bench.memory.forget(first)
    assert bench.store(second) == [False]
    bench.memory.unpin(slots)
    assert bench.store(second) == [True]
    assert bench.read(second) is BlockCheck.OK


def test_memory_claimed_slots_are_given_back_or_filled_once() -> None:
    bench = Memory(4)
    first, *_ = chain(1, 4)
    assert len(bench.memory.claim(9, ())) == 4
    assert bench.store(first) == [False]
    bench.memory.give_back(range(4))
    slots = bench.memory.claim(2, ())
    bench.pool.block(0)[:] = content_of(first)
    for slot in slots:
        bench.memory.fill(slot, first, bench.pool.block(0))
    assert list(bench.memory.stored) == [first] and bench.read(first) is BlockCheck.OK
    assert len(bench.memory.claim(9, (first,))) == 3


def test_memory_any_history_agrees_with_an_ordered_dict() -> None:
    rng = random.Random(3)
    bench, oracle = Memory(8), OrderedDict[bytes, None]()
    names = chain(1, 20)
    for _ in range(2000):
        name = rng.choice(names)
        match rng.randrange(3):
            case 0 if name not in oracle:
                bench.store(name)
                if len(oracle) == 8:
                    oracle.popitem(last=False)
                oracle[name] = None
            case 1 if name in oracle:
                bench.memory.touch([name])
                oracle.move_to_end(name)
            case 2:
                assert (bench.read(name) is BlockCheck.OK) == (name in oracle)
                if name in oracle:
                    oracle.move_to_end(name)
        assert set(bench.memory.stored) == set(oracle)


# -- leases -----------------------------------------------------------------------------------------------------------------
def test_lease_ends_by_release_by_its_holder_by_time_and_at_its_limit() -> None:
    bench = Memory(16)
    names = chain(1, 4)
    bench.store(*names)
    leases = Leases(bench.memory, lease_s=10.0, max_lease_s=25.0)
    holders = [object(), object()]
    for number, holder in enumerate(holders):
        leases.take(holder, bytes([number]) * 16, names[:3], 0.0)
    assert (len(leases), bench.memory.num_pinned) == (2, 3)
    leases.release(holders[0], [bytes(16)])
    leases.release(holders[0], [bytes(16)])
    leases.release(holders[0], [b"\1" * 16])  # another's
    assert (len(leases), bench.memory.num_pinned) == (1, 3)
    leases.renew(holders[1], [b"\1" * 16], 9.0)
    leases.expire(18.0)
    assert len(leases) == 1
    leases.renew(holders[1], [b"\1" * 16], 18.0)
    leases.renew(holders[1], [b"\1" * 16], 24.0)
    leases.expire(25.5)
    assert (len(leases), bench.memory.num_pinned) == (0, 0)
    leases.take(holders[1], bytes(16), names, 30.0)
    leases.release_all(holders[1])
    assert (len(leases), bench.memory.num_pinned) == (0, 0)


def test_leases_hold_half_of_the_memory_at_most_and_a_new_one_replaces_the_old() -> None:
    bench = Memory(8)
    names = chain(1, 8)
    bench.store(*names)
    leases = Leases(bench.memory, 10.0, 60.0)
    holder = object()
    leases.take(holder, bytes(16), names, 0.0)
    assert bench.memory.num_pinned == 4
    leases.take(holder, b"\1" * 16, names[4:], 0.0)
    assert (bench.memory.num_pinned, len(leases)) == (4, 1)
    leases.take(holder, bytes(16), names[:1], 0.0)
    assert bench.memory.num_pinned == 1


# -- options ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70_000),
        ("num_streams", 0),
        ("capacity_bytes", "lots"),
        ("lease_s", 0),
        ("peers", "10.0.0.1"),
        ("peers", ["10.0.0.1:0"]),
        ("surprise", 1),
    ],
)
def test_bad_option_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"connector\.options\.{name}"):
        create_connector("tcp", {name: value}, SteppedClock())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"host": "0.0.0.0"}, "advertise"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.1"}, "host"),
        ({"host": "node-7.cluster"}, "host"),
        ({"capacity_bytes": 100}, "capacity_bytes"),
        ({"key_file": "/no/such/file"}, "key_file"),
        ({"host": "::1%nowhere"}, "host"),
    ],
)
def test_node_that_cannot_serve_as_told_is_refused_before_it_starts(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"connector\.options\.{field}"):
        create_connector("tcp", options, SteppedClock()).register_kv_cache(KVPoolMemory(LAYOUT, 1))


def test_peers_are_a_list_or_a_text() -> None:
    wanted = ("10.0.0.1:7", "[::1]:8")
    assert tcp_options({"peers": "10.0.0.1:7, [::1]:8"}).peers == tcp_options({"peers": list(wanted)}).peers == wanted


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, "127.0.0.1:77"),
        ({"host": "::1"}, "[::1]:77"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.1"}, "10.0.0.1:77"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.1:99"}, "10.0.0.1:99"),
        ({"host": "::", "advertise": "fd00::7"}, "[fd00::7]:77"),
        ({"host": "::", "advertise": "[fd00::7]:99"}, "[fd00::7]:99"),
    ],
)
def test_advertised_address_is_host_and_port(options: dict[str, Any], address: str) -> None:
    assert advertised_address(tcp_options(options), 77) == address


def test_key_file_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 64)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        read_secret(str(path))
    path.chmod(0o600)
    assert len(read_secret(str(path))) == 32
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="at least 32 bytes") as caught:
        read_secret(str(path))
    assert "short\\n" not in str(caught.value)
