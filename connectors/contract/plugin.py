"""The pytest plugin: puts a connector under the contract by its name and a template of its options.

    pytest --pyargs connectors.contract.suite --kvrelay-connector NAME --kvrelay-option path={directory}/{store}

An entry point loads this in every run of pytest in an environment with kvrelay, so that it imports next to nothing.
"""

from __future__ import annotations

import pytest

CONNECTOR_FLAG = "--kvrelay-connector"
OPTION_FLAG = "--kvrelay-option"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of the suite."""
    group = parser.getgroup("kvrelay", "the contract of kvrelay's connectors")
    group.addoption(CONNECTOR_FLAG, metavar="NAME", help="the connector to be tested, by the name of its entry point")
    group.addoption(
        OPTION_FLAG,
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the connector; in VALUE, {directory} is an empty folder of the test, {store} the name of the store "
        "that is to be opened, {num_blocks} how many blocks it shall hold and {bytes} how many bytes these are",
    )
    group.addoption("--kvrelay-persistent", action="store_true", help="blocks outlive the last user of a store")
    group.addoption("--kvrelay-one-process", action="store_true", help="other processes do not see a saved block")
