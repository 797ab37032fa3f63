"""Lookups while what a store waits for hangs: a server or another node that was stopped, or whoever holds its lock.

The media of the benchmark of connectors know how to make theirs hang; `python -m bench.connectors --lookups` has the percentiles.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from bench.connectors import Driver
from bench.media.medium import Medium
from core.kv.layout import KVLayout
from tests.support.redis_server import EXECUTABLE

LAYOUT = KVLayout(num_layers=360, block_size=16, num_kv_heads=1, head_dim=16, dtype="bfloat16")
NUM_LOOKUPS = 200
MAX_RATIO = 20.0  # one lookup that waited for an answer would take a thousand times as long as all of them


def check_lookups(backend: str, folder: Path) -> None:
    """Those of a store that hangs take no multiple of those before."""
    medium: Medium = importlib.import_module(f"bench.media.{backend}").create_medium(folder, LAYOUT.block_bytes)
    try:
        driver = Driver(backend, medium.options(), LAYOUT)
        known = [os.urandom(16) for _ in range(10_000)]
        medium.make_known(driver.connector, known)
        before_us = driver.lookup_us(known, "before", NUM_LOOKUPS)
        assert medium.hang(driver.connector)
        hung_us = driver.lookup_us(known, "hung", NUM_LOOKUPS)
        medium.resume()
        driver.connector.close()
    finally:
        medium.close()
    assert sum(hung_us) < MAX_RATIO * sum(before_us)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_lookups_of_a_store_that_hangs_do_not_wait(backend: str, tmp_path: Path) -> None:
    check_lookups(backend, tmp_path)


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
@pytest.mark.parametrize("backend", ["redis", "tiered"])
def test_lookups_of_a_hung_server_where_redis_is_installed_do_not_wait(backend: str, tmp_path: Path) -> None:
    check_lookups(backend, tmp_path)
