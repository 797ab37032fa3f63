"""The contract for the connector that pytest's command line names; plugin.py has the flags.

pytest --pyargs connectors.contract.suite --kvrelay-connector NAME --kvrelay-option KEY=VALUE
"""

from __future__ import annotations

from typing import Any

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, REAL_LAYOUT
from connectors.contract.plugin import CONNECTOR_FLAG, OPTION_FLAG
from connectors.stored_block import BLOCK_HEADER_BYTES


def harness_from_flags(config: pytest.Config) -> type[ConnectorHarness]:
    """A harness without hooks for damage. Raises UsageError for a missing or malformed flag."""
    name: str = config.getoption(CONNECTOR_FLAG) or ""
    templates = {}
    if not name:
        raise pytest.UsageError(f"{CONNECTOR_FLAG} is missing: the name of a connector")
    for flag in config.getoption(OPTION_FLAG):
        key, equals, template = flag.partition("=")
        if not key or not equals:
            raise pytest.UsageError(f"{OPTION_FLAG} {flag!r}: must be KEY=VALUE")
        templates[key] = template

    class FlagsHarness(ConnectorHarness):
        connector_name = name
        is_persistent = config.getoption("--kvrelay-persistent")
        is_shared = not config.getoption("--kvrelay-one-process")

        def options(self, store: str, num_blocks: int) -> dict[str, Any]:
            num_bytes = num_blocks * (LAYOUT.block_bytes + BLOCK_HEADER_BYTES)
            if num_blocks > 1000:  # the roomiest one also has to hold some blocks of a real model
                num_bytes += 20 * (REAL_LAYOUT.block_bytes + BLOCK_HEADER_BYTES)
            words = {"directory": str(self.directory), "store": store, "num_blocks": str(num_blocks), "bytes": str(num_bytes)}
            return {key: _filled(template, words) for key, template in templates.items()}

    return FlagsHarness


def _filled(template: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        template = template.replace(f"{{{word}}}", value)
    return template


class TestConnector(ConnectorContract):
    """All of it."""

    def choose_harness(self, config: pytest.Config) -> type[ConnectorHarness]:
        """By flags."""
        return harness_from_flags(config)
