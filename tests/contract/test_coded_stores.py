"""The contract over stores whose blocks are encoded and encrypted, and what is particular to those."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from connectors.coding.block_cipher import BlockCipher
from connectors.coding.block_coding import BlockCoding
from connectors.contract.contract import ConnectorContract
from connectors.contract.node import LAYOUT, REAL_LAYOUT, Node, SteppedClock, chain
from connectors.registry import create_connector, open_browser
from connectors.slots.store import slot_bytes
from core.errors import ConfigError
from core.kv.connector import TransferDirection, TransferOutcome
from core.kv.layout import KVLayout
from deploy.cache_blocks import Progress, export_blocks, import_blocks, verify_blocks
from tests.contract.test_nvme import NvmeHarness
from tests.contract.test_redis import RedisHarness
from tests.support.redis_server import EXECUTABLE, RedisProcess

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
QUIET = Progress("did")
TWO_MIB = KVLayout(32, 16, 8, 128, "bfloat16")  # a value in two parts in redis
redis_is_installed = pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")


def key_file(folder: Path, key: bytes = KEY) -> str:
    """A file with this key."""
    path = folder / f"key-{key.hex()[:6]}"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_bytes(key)
    return str(path)


class EncryptedNvmeHarness(NvmeHarness):
    fingerprint = BlockCoding(LAYOUT, None, BlockCipher(KEY)).fingerprint

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {**super().options(store, num_blocks), "encryption_key_file": key_file(self.directory)}


class TestNvmeEncrypted(ConnectorContract):
    harness_type = EncryptedNvmeHarness


class EncryptedRedisHarness(RedisHarness):
    takes_floats_only = True  # as its codec does

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        coded = {"codec": "zstd", "encryption_key_file": key_file(self.directory)}
        return {**super().options(store, num_blocks), **coded}


@redis_is_installed
class TestRedisCompressedAndEncryptedWhereAServerIsInstalled(ConnectorContract):
    harness_type = EncryptedRedisHarness


class KVNode(Node):
    """Blocks that look like KV: they shrink, and lossy codecs come close to them. max_error: of a number."""

    max_error = 0.0

    def content(self, name: bytes) -> bytes:
        rng = np.random.default_rng(np.frombuffer(name, dtype=np.uint32))
        values = rng.standard_normal(self.layout.block_bytes // 2).astype(np.float32)
        return bytes((values.view(np.uint32) >> 16).astype("<u2").tobytes())

    def fill(self, transfer: Any) -> None:
        for block_id, name in zip(transfer.block_ids, transfer.block_hashes, strict=True):
            self.pool.block(block_id)[:] = self.content(name)

    def check(self, transfer: Any, result: Any) -> None:
        if transfer.direction is TransferDirection.SAVE:
            return
        for block_id, name in list(zip(transfer.block_ids, transfer.block_hashes, strict=True))[: result.num_blocks_ok]:
            loaded, saved = bytes(self.pool.block(block_id)), self.content(name)
            if not self.max_error:
                assert loaded == saved
            assert np.abs(_floats(loaded) - _floats(saved)).max() <= self.max_error


def _floats(payload: bytes) -> np.ndarray:
    return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)


class Nodes:
    """KV nodes on one store, closed in the end."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self._nodes: list[KVNode] = []

    def open(self, layout: KVLayout = REAL_LAYOUT, **options: Any) -> KVNode:
        clock = SteppedClock()
        node = KVNode(create_connector(self.name, {**self.options, **options}, clock), clock, layout)
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            node.connector.close()
        self._nodes.clear()


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    nodes = Nodes("nvme", {"path": str(tmp_path / "store"), "capacity_bytes": "64MiB"})
    yield nodes
    nodes.close()


@pytest.fixture
def server(tmp_path: Path) -> Any:
    process = RedisProcess(tmp_path / "redis")
    nodes = Nodes("redis", {"url": process.url})
    yield nodes
    nodes.close()
    process.end()


@pytest.mark.parametrize("layout", [REAL_LAYOUT, TWO_MIB], ids=["one value", "two values"])
@redis_is_installed
def test_redis_compressed_where_installed_takes_less_and_is_read_by_nodes_that_do_not_compress(
    server: Nodes, layout: KVLayout, tmp_path: Path
) -> None:
    hashes = chain(1, 4, layout)
    writer = server.open(layout, codec="zstd")
    assert writer.save(hashes).outcome is TransferOutcome.OK
    browser = open_browser("redis", server.options)
    entries = list(browser.entries())
    assert len(entries) == 4 and all(entry.num_bytes < 0.9 * layout.block_bytes for entry in entries)
    assert server.open(layout).load(hashes).outcome is TransferOutcome.OK
    assert writer.load(hashes).outcome is TransferOutcome.OK
    assert verify_blocks(browser, entries, QUIET).num_ok == 4
    file = io.BytesIO()  # decompressed, so that a store of slots can take them
    export_blocks(browser, entries, file, QUIET)
    browser.close()
    disk = Nodes("nvme", {"path": str(tmp_path / "disk"), "capacity_bytes": "64MiB"})
    target = open_browser("nvme", disk.options)
    assert import_blocks(target, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 4}
    assert disk.open(layout).load(hashes).outcome is TransferOutcome.OK
    target.close()
    disk.close()


@redis_is_installed
def test_redis_encrypted_where_installed_exports_sealed_blocks_that_another_server_can_take(
    server: Nodes, tmp_path: Path
) -> None:
    coded = {"codec": "zstd", "encryption_key_file": key_file(tmp_path)}
    hashes = chain(1, 4, TWO_MIB)
    assert server.open(TWO_MIB, **coded).save(hashes).outcome is TransferOutcome.OK
    source = open_browser("redis", server.options)
    file = io.BytesIO()
    assert export_blocks(source, source.entries(), file, QUIET).num_ok == 4
    source.close()
    other = open_browser("redis", {**server.options, "namespace": "other"})
    assert import_blocks(other, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 4}
    other.close()
    assert server.open(TWO_MIB, namespace="other", **coded).load(hashes).outcome is TransferOutcome.OK


@pytest.mark.parametrize("codec", ["none", "zstd", "int8"])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["open", "encrypted"])
@redis_is_installed
def test_redis_garbage_of_any_length_where_installed_is_a_miss_and_makes_way(
    server: Nodes, codec: str, is_encrypted: bool, tmp_path: Path
) -> None:
    node = server.open(codec=codec, **({"encryption_key_file": key_file(tmp_path)} if is_encrypted else {}))
    node.max_error = 0.05 if codec == "int8" else 0.0
    lengths = [0, 1, 63, 64, 65, 112, 5000, REAL_LAYOUT.block_bytes, REAL_LAYOUT.block_bytes + 64, REAL_LAYOUT.block_bytes + 200]
    hashes = chain(1, len(lengths), REAL_LAYOUT)
    assert node.save(hashes).outcome is TransferOutcome.OK
    with redis.Redis.from_url(server.options["url"]) as client:
        good = client.get(next(client.scan_iter(f"*{hashes[0].hex()}")))
        assert isinstance(good, bytes)
        for name, length in zip(hashes, lengths, strict=True):
            (key,) = client.scan_iter(f"*{name.hex()}")
            client.set(key, (good + bytes(length))[-length:] if length % 2 else good[:64] + os.urandom(length)[64:], keepttl=True)
    for position in range(len(lengths)):
        result = node.load(hashes[position : position + 1])
        assert result.num_blocks_ok == 0 and result.outcome in (TransferOutcome.MISS, TransferOutcome.CORRUPT), lengths[position]
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).outcome is TransferOutcome.OK


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_nvme_lossy_slots_are_little_more_than_half_and_kept_apart_from_exact_ones(disk: Nodes, codec: str) -> None:
    hashes = chain(1, 4, REAL_LAYOUT)
    lossy = disk.open(codec=codec)
    lossy.max_error = 0.3 if codec == "fp8" else 0.05
    assert lossy.save(hashes).outcome is TransferOutcome.OK
    assert lossy.load(hashes).outcome is TransferOutcome.OK
    assert lossy.stats().store_bytes < 4 * 0.6 * slot_bytes(REAL_LAYOUT)
    exact = disk.open()
    assert exact.lookup(hashes) == 0 and exact.load(hashes).num_blocks_ok == 0
    assert exact.save(hashes).outcome is TransferOutcome.OK and exact.load(hashes).outcome is TransferOutcome.OK
    assert lossy.load(hashes).outcome is TransferOutcome.OK
    browser = open_browser("nvme", disk.options)
    assert verify_blocks(browser, browser.entries(), QUIET).num_ok == 8
    browser.close()


@pytest.mark.parametrize("name", ["disk", pytest.param("server", marks=redis_is_installed)])
def test_block_that_a_lossy_codec_cannot_hold_is_not_stored_where_installed(name: str, request: pytest.FixtureRequest) -> None:
    nodes = request.getfixturevalue(name)
    node, hashes = nodes.open(codec="int8"), chain(1, 3, REAL_LAYOUT)
    node.max_error = 0.05
    transfer = node.transfer(TransferDirection.SAVE, hashes)
    node.fill(transfer)
    node.pool.block(1)[:2] = b"\x80\x7f"  # infinity
    node.connector.start_save(transfer)
    (result,) = node.results([transfer])
    assert (result.num_blocks_ok, result.outcome) == (1, TransferOutcome.MISS)
    assert node.load(hashes).num_blocks_ok == 1
    assert node.stats().num_open_references == 0
    assert node.save(hashes).outcome is TransferOutcome.OK and node.load(hashes).outcome is TransferOutcome.OK


@pytest.mark.parametrize("name", ["disk", pytest.param("server", marks=redis_is_installed)])
def test_wrong_key_is_a_miss_that_says_so_and_does_not_block_the_block_where_installed(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    nodes = request.getfixturevalue(name)
    hashes = chain(1, 3, REAL_LAYOUT)
    assert nodes.open(encryption_key_file=key_file(tmp_path)).save(hashes).outcome is TransferOutcome.OK
    assert nodes.open().lookup(hashes) == 0  # without a key they are none of ours
    other = nodes.open(encryption_key_file=key_file(tmp_path, OTHER_KEY))
    result = other.load(hashes)
    assert (result.num_blocks_ok, result.outcome) == (0, TransferOutcome.MISS)
    assert BlockCipher(KEY).key_id.hex() in result.detail and BlockCipher(OTHER_KEY).key_id.hex() in result.detail
    assert other.save(hashes).outcome is TransferOutcome.OK
    assert other.load(hashes).outcome is TransferOutcome.OK


def test_nvme_encrypted_has_nothing_of_a_block_on_disk(disk: Nodes, tmp_path: Path) -> None:
    hashes = chain(1, 3, REAL_LAYOUT)
    node = disk.open(encryption_key_file=key_file(tmp_path))
    assert node.save(hashes).outcome is TransferOutcome.OK
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("segment"))
    assert hashes[0] in stored  # a name
    for name in hashes:
        content = node.content(name)
        assert not any(content[start : start + 24] in stored for start in range(0, len(content), 4096))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nvme", {"codec": "zstd"}, "connector.options.codec: got 'zstd'; allowed: one of none, int8, fp8 (slots are"),
        ("shm", {"codec": "gzip"}, "connector.options.codec: got 'gzip'"),
        ("redis", {"codec": "lz4"}, "connector.options.codec: got 'lz4'; allowed: one of none, zstd, int8, fp8"),
        ("redis", {"codec": "zstd", "codec_level": 40}, "connector.options.codec_level: got 40"),
        ("nvme", {"encryption_key_file": "/nowhere/key"}, "connector.options.encryption_key_file: got '/nowhere/key'"),
    ],
)
def test_codec_options_that_are_not_allowed_end_the_start(
    name: str, options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    place = {"path": str(tmp_path)} if name == "nvme" else {}
    with pytest.raises(ConfigError) as raised:
        create_connector(name, {**place, **options}, SteppedClock())
    assert expected in str(raised.value)
