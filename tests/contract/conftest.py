"""Fixtures of several contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.store_browser import StoreBrowser


@pytest.fixture
def browsers() -> Iterator[list[StoreBrowser]]:
    """What a test opens to look into stores, closed after it."""
    opened: list[StoreBrowser] = []
    yield opened
    for browser in opened:
        browser.close()
