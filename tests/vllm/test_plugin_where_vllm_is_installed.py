"""Real vLLM processes that share prefixes through our stores, and go on when a store is killed, hung or damaged.

Hits are vLLM's own figures; every answer is compared with that of a vLLM without us. `make test-vllm` sets up what this needs.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import EXECUTABLE, RedisProcess
from tests.vllm.server import ANSWER_TIMEOUT_S, BLOCK_SIZE, VllmServer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm installs it"),
    pytest.mark.timeout(900),
]
NUM_OUTPUT_TOKENS = 40  # more than a block, so that generated blocks are shared as well
PROMPTS = [random.Random(seed).choices(range(1000, 40000), k=length) for seed, length in enumerate((300, 130, 450, 200, 65))]


def num_hit_tokens(prompt: list[int]) -> int:
    """What a vLLM without a cache of its own takes from the store; the last token is left to compute."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of vLLM without us."""
    server = VllmServer(tmp_path_factory.mktemp("plain"))
    try:
        server.wait_ready()
        return [server.complete(prompt, NUM_OUTPUT_TOKENS) for prompt in PROMPTS]
    finally:
        server.end()


def start(folder: Path, options: dict[str, Any], count: int = 1) -> list[VllmServer]:
    servers = [VllmServer(folder, {"load_timeout_s": 5.0, **options}) for _ in range(count)]
    try:
        return [server.wait_ready() for server in servers]
    except BaseException:
        for server in servers:
            server.kill()
        raise


@pytest.fixture(scope="class")
def nvme_server(tmp_path_factory: pytest.TempPathFactory, answers: list[list[int]]) -> Iterator[tuple[VllmServer, Path]]:
    """The second process on a store that a first one, which is gone, has filled."""
    folder = tmp_path_factory.mktemp("nvme")
    options = {"connector": "nvme", "path": str(folder / "store"), "capacity_bytes": "1GiB"}
    (first,) = start(folder, options)
    try:
        assert [first.complete(prompt, NUM_OUTPUT_TOKENS) for prompt in PROMPTS] == answers
        assert first.num_external_hit_tokens() == 0
    finally:
        first.end()
    (second,) = start(folder, options)
    yield second, folder / "store"
    second.end()


class TestNvme:
    def test_nvme_second_process_first_request_is_a_hit_with_the_same_tokens(
        self, nvme_server: tuple[VllmServer, Path], answers: list[list[int]]
    ) -> None:
        server, _store = nvme_server
        assert server.complete(PROMPTS[0], NUM_OUTPUT_TOKENS) == answers[0]
        assert server.num_external_hit_tokens() == num_hit_tokens(PROMPTS[0])
        # What the first process generated is shared as well.
        grown = PROMPTS[1] + answers[1]
        server.complete(grown, 1)
        assert server.num_external_hit_tokens() == num_hit_tokens(PROMPTS[0]) + num_hit_tokens(grown)
        assert server.num_failed_loads() == 0

    def test_nvme_damaged_blocks_are_computed_and_stored_again(
        self, nvme_server: tuple[VllmServer, Path], answers: list[list[int]]
    ) -> None:
        server, store = nvme_server
        damage_all_blocks(store)
        before = server.num_external_hit_tokens()
        assert server.complete(PROMPTS[2], NUM_OUTPUT_TOKENS) == answers[2]
        assert server.num_external_hit_tokens() == before + num_hit_tokens(PROMPTS[2])  # so it was told, and found out
        assert server.num_failed_loads() == 1
        server.forget_local_prefixes()
        assert server.complete(PROMPTS[2], NUM_OUTPUT_TOKENS) == answers[2]
        assert server.num_external_hit_tokens() == before + 2 * num_hit_tokens(PROMPTS[2])
        assert server.num_failed_loads() == 1


def damage_all_blocks(store: Path) -> None:
    """Flip a bit in each 4 KiB of everything in the store but its index."""
    (segment,) = (path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 64 * 1024 * 1024)
    with segment.open("r+b") as file:
        for start in range(0, segment.stat().st_size, 4096):
            file.seek(start + 2048)
            byte = file.read(1)
            file.seek(start + 2048)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
def test_redis_two_processes_share_prefixes_and_outlive_a_server_that_hangs_and_dies(
    tmp_path: Path, answers: list[list[int]]
) -> None:
    store = RedisProcess(tmp_path / "redis", "--maxmemory", "500mb")
    servers: list[VllmServer] = []
    try:
        servers = start(tmp_path, {"connector": "redis", "url": store.url, "op_timeout_s": 1.0}, count=2)
        first, second = servers
        assert first.complete(PROMPTS[0], NUM_OUTPUT_TOKENS) == answers[0]
        wait_for_blocks(store, (len(PROMPTS[0]) + NUM_OUTPUT_TOKENS - 1) // BLOCK_SIZE)
        assert second.complete(PROMPTS[0], NUM_OUTPUT_TOKENS) == answers[0]
        assert second.num_external_hit_tokens() == num_hit_tokens(PROMPTS[0])
        assert first.complete(PROMPTS[2], NUM_OUTPUT_TOKENS) == answers[2]

        store.pause()  # with everything known and connected
        seconds = [timed(second, number, answers) for number in (2, 3)]
        store.resume()
        assert max(seconds) < ANSWER_TIMEOUT_S / 4

        # kill -9 in the middle of a request.
        request = threading.Thread(target=store_killer, args=(store,))
        request.start()
        assert second.complete(PROMPTS[1], NUM_OUTPUT_TOKENS) == answers[1]
        request.join()
        second.forget_local_prefixes()
        for number in (0, 1, 4):
            timed(second, number, answers)

        store.start()  # empty; it is used again without a word from anybody
        before, deadline_s = second.num_external_hit_tokens(), time.monotonic() + ANSWER_TIMEOUT_S
        while second.num_external_hit_tokens() == before:
            assert time.monotonic() < deadline_s, "a store that is back is not used"
            second.forget_local_prefixes()
            timed(second, 4, answers)
    finally:
        for server in servers:
            server.end()
        store.end()


def timed(server: VllmServer, number: int, answers: list[list[int]]) -> float:
    """Seconds for a prompt whose answer must be right."""
    started_s = time.monotonic()
    assert server.complete(PROMPTS[number], NUM_OUTPUT_TOKENS) == answers[number]
    return time.monotonic() - started_s


def store_killer(store: RedisProcess) -> None:
    time.sleep(0.3)
    store.kill()


def wait_for_blocks(store: RedisProcess, num_blocks: int) -> None:
    """Until the server has keys for so many blocks at least."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    with store.client() as client:
        while len(set(client.scan_iter(count=10000))) < num_blocks:
            assert time.monotonic() < deadline_s, "the blocks are not stored"
            time.sleep(0.05)
