"""The parts of the redis connector that need no server: what is known, when it expires, how blocks are cut and named."""

from __future__ import annotations

import time

import pytest
from redis.crc import key_slot

from connectors.contract.node import LAYOUT, SteppedClock, chain
from connectors.known_blocks import KnownBlocks
from connectors.redis.cluster import SlotMap
from connectors.redis.prefix_expiry import PrefixExpiry
from connectors.redis.save_trouble import SaveTrouble
from connectors.redis.values import BlockValues, size_class, split_payload
from connectors.registry import create_connector
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConfigError, ConnectorError
from core.kv.layout import KVLayout

HASHES = chain(1, 10)
MIB = 1024 * 1024
SPLIT_LAYOUT = KVLayout(num_layers=16, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 1 MiB: two values


def test_known_blocks_new_request_with_an_unknown_block_is_asked_about() -> None:
    known = KnownBlocks(1000)
    assert known.count_prefix("r", HASHES, 0) is None
    known.add(HASHES[:4], known.epoch)
    assert known.count_prefix("r", HASHES, 0) is None
    assert known.count_prefix("r", HASHES[:4], 0) == 4
    assert known.count_prefix("r", HASHES[:4], 3) == 1
    assert known.count_prefix("r", [], 0) == 0


def test_known_blocks_checked_request_is_answered_up_to_its_end() -> None:
    known = KnownBlocks(1000)
    known.add(HASHES[:4], known.epoch)
    known.note_check("r", HASHES[4], known.epoch)
    assert [known.count_prefix("r", HASHES, first) for first in (0, 2, 4)] == [4, 2, 0]
    assert known.count_prefix("r", HASHES, 5) is None  # beyond the hole
    assert known.count_prefix("other", HASHES, 0) is None
    known.add([HASHES[4]], known.epoch)  # saved since: its end is not the end any more
    assert known.count_prefix("r", HASHES, 0) is None


def test_known_blocks_new_epoch_is_believed_only_for_requests_checked_before() -> None:
    known = KnownBlocks(1000)
    known.add(HASHES[:4], known.epoch)
    known.note_check("r", HASHES[4], known.epoch)
    assert not known.should_check_again("r")
    known.begin_epoch()
    assert known.count_prefix("r", HASHES, 0) == 4
    assert known.should_check_again("r")
    assert known.count_prefix("new", HASHES[:4], 0) is None
    known.add(HASHES[:4], known.epoch - 1)  # learned before, told late
    assert known.count_prefix("new", HASHES[:4], 0) is None


def test_known_blocks_removed_block_is_unknown() -> None:
    known = KnownBlocks(1000)
    known.add(HASHES, known.epoch)
    known.note_check("r", None, known.epoch)
    known.remove([HASHES[6]])
    assert known.count_prefix("r", HASHES, 0) is None
    assert known.count_prefix("r", HASHES[:6], 0) == 6


def test_known_blocks_over_their_bound_forget_the_oldest() -> None:
    known = KnownBlocks(100)
    for seed in range(50):
        known.add(chain(seed, 10), known.epoch)
        known.remove(chain(seed, 10)[:3])
        known.add(chain(seed, 10)[:1], known.epoch)
        assert len(known) <= 100
        assert len(known._oldest) <= 200
    assert known.count_prefix("r", chain(49, 10)[3:], 0) == 7
    assert known.count_prefix("r", chain(0, 10)[3:], 0) is None
    for number in range(20_000):
        known.note_check(f"request {number}", None, 0)
    assert len(known._end_by_request) < 10_000


def test_prefix_expiry_chunks_of_one_pass_share_a_moment() -> None:
    expiry = PrefixExpiry(lifetime_ms=1000)
    first = expiry.plan("r", 0, 16, now_ms=100)
    second = expiry.plan("r", 16, 16, now_ms=600)
    assert (first.first_stale, second.first_stale) == (0, 16)
    assert [first.expiry_ms(0), first.expiry_ms(15), second.expiry_ms(16)] == [1100, 1099, 1098]


def test_prefix_expiry_another_pass_renews_all_from_the_first_block() -> None:
    expiry = PrefixExpiry(lifetime_ms=1000)
    expiry.plan("r", 0, 16, now_ms=100)
    again = expiry.plan("r", 8, 8, now_ms=200)
    assert (again.base_ms, again.first_stale) == (1200, 0)
    other = expiry.plan("later", 32, 8, now_ms=300)  # its first 32 blocks were hits elsewhere
    assert (other.base_ms, other.first_stale) == (1300, 0)


def test_prefix_expiry_request_that_outlives_its_moment_gets_another() -> None:
    expiry = PrefixExpiry(lifetime_ms=1000)
    expiry.plan("r", 0, 16, now_ms=100)
    late = expiry.plan("r", 16, 16, now_ms=601)
    assert (late.base_ms, late.first_stale) == (1601, 0)


def test_prefix_expiry_gap_within_a_pass_is_renewed() -> None:
    expiry = PrefixExpiry(lifetime_ms=1000)
    expiry.plan("r", 0, 8, now_ms=100)
    assert expiry.plan("r", 20, 8, now_ms=200).first_stale == 8


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(20 * 1024, 20 * 1024), (20 * 1024 + 1, 24 * 1024), (2 * MIB + 1, 2.5 * MIB)]
)
def test_size_class_is_jemallocs(num_bytes: int, expected: float) -> None:
    assert size_class(num_bytes) == expected


@pytest.mark.parametrize("block_bytes", [2048, 64 * 1024, 360 * 1024, MIB, 2 * MIB, 5 * MIB, 2 * MIB - 4096, 3_000_000])
def test_split_payload_covers_all_and_wastes_little(block_bytes: int) -> None:
    parts = split_payload(block_bytes)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == block_bytes
    if block_bytes > 64 * 1024:
        needed = [part.stop - part.start + 32 + (BLOCK_HEADER_BYTES if part.start == 0 else 0) for part in parts]
        allocated = sum(size_class(size) if size > 16 * 1024 else size for size in needed)
        assert allocated <= 1.101 * sum(needed)


def test_block_values_names_differ_by_namespace_layout_and_part() -> None:
    values = BlockValues(b"ns:1:layout:", (slice(0, 10), slice(10, 20)))
    first, second = values.keys(HASHES[0])
    assert first == b"ns:1:layout:" + HASHES[0].hex().encode()
    assert second == first + b":1"
    assert BlockValues.of("a", LAYOUT).key_prefix != BlockValues.of("b", LAYOUT).key_prefix
    pieces = values.set(HASHES[0], b"HEAD", memoryview(bytes(range(20))), 1234)
    sent = b"".join(bytes(piece) for piece in pieces)
    assert sent.count(b"PSETEX\r\n") == sent.count(b"$4\r\n1234\r\n") == 2
    assert b"$14\r\nHEAD\x00\x01" in sent


@pytest.mark.parametrize(
    "options",
    [
        {"url": "http://host:1"},
        {"url": "redis://:secret@host:1/0?protocol=3"},
        {"url": "redis://:secret@host:1/0?no_such_argument=1"},
        {"namespace": "with space"},
        {"namespace": ""},
        {"expiry_s": 1},
        {"num_connections": 0},
        {"num_threads": "many"},
        {"op_timeout_s": 0},
        {"connect_timeout_s": -1},
        {"max_known_hashes": 1},
        {"lookup_batch_size": 0},
        {"pasword": "secret"},
    ],
    ids=str,
)
def test_redis_connector_bad_option_is_refused_by_name_and_no_secret_is_shown(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"connector\.options\.{name}") as caught:
        create_connector("redis", options, SteppedClock())
    assert "secret" not in str(caught.value)


def test_redis_save_trouble_is_told_once_and_forgotten_after_minutes_without_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trouble, now_s = SaveTrouble("host:1"), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for _ in range(2):
        trouble.note(is_full=True, error=None, has_stored=True)
        trouble.note(is_full=False, error=None, has_stored=False)  # tells nothing
        assert "full" in trouble.text
    trouble.note(is_full=False, error=None, has_stored=True)
    assert trouble.text == ""
    trouble.note(is_full=True, error=None, has_stored=False)
    assert len(caplog.records) == 1
    now_s[0] += 301.0
    assert trouble.text == ""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"url": "redis://user:secret@cache.example:99999/3"}, "'redis://cache.example:99999/3'"),
        ({"url": "redis://user:se/cret@cache.example:99999/3"}, "(not shown)"),
        ({"url": "redis://:a@secret@cache.example:99999"}, "(not shown)"),
        ({"url": "redis://user:secret"}, "'redis://user:…'"),
        ({"url": "redis://cache.example:1/0?timeout=abc&password=secret"}, "'redis://cache.example:1/0?timeout,password'"),
        ({"timeout": "5s"}, "5s"),
        ({"timeout": 5}, "5"),
        ({"passwort": 5}, "(not shown)"),
    ],
    ids=str,
)
def test_redis_connector_wrong_address_or_option_is_shown_without_secrets(options: dict[str, object], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_connector("redis", options, SteppedClock())
    assert f"got {shown}" in str(caught.value).replace("'5s'", "5s").replace("'(not shown)'", "(not shown)")
    assert "secret" not in str(caught.value)


def test_redis_connector_password_that_looks_like_a_number_is_a_password() -> None:
    connector = create_connector("redis", {"password": 1234}, SteppedClock())
    assert "1234" not in repr(connector._options)  # type: ignore[attr-defined]


def test_block_values_of_a_cluster_are_in_one_slot_and_of_different_blocks_in_many() -> None:
    values = BlockValues.of("kvrelay", SPLIT_LAYOUT, is_cluster=True)
    slots = [{key_slot(key) for key in values.keys(name)} for name in chain(1, 50)]
    assert values.num_parts == 2
    assert all(len(found) == 1 for found in slots)
    assert len(set.union(*slots)) > 40


def test_slot_map_finds_a_blocks_server_and_refuses_holes() -> None:
    name = HASHES[0]
    slot = key_slot(name.hex().encode())
    reply = [
        [0, slot - 1, [b"10.0.0.1", 6379]],
        [slot, slot, [b"", 7000], [b"10.0.0.9", 1]],
        [slot + 1, 16383, [b"10.0.0.1", 6379]],
    ]
    found = SlotMap.of(reply, "10.0.0.3")
    assert found.node_of(name) == ("10.0.0.3", 7000)  # one that does not know its own address
    assert set(found.nodes) == {("10.0.0.1", 6379), ("10.0.0.3", 7000)}
    with pytest.raises(ConnectorError, match="1 slots"):
        SlotMap.of([reply[0], reply[2]], "10.0.0.3")
