"""The contract of every KVConnector. To put a connector under it, in tests of your own:

    class MyHarness(ConnectorHarness): ...        # how to configure it, how to damage it
    class TestMine(ConnectorContract):
        harness_type = MyHarness

Or without a line of code, by pytest's command line: see plugin.py.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.contract.damage_contract import DamageContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.medium_contract import MediumContract
from connectors.contract.node import wait_until
from connectors.contract.prefix_contract import PrefixContract
from connectors.contract.pressure_contract import PressureContract
from connectors.contract.process_contract import ProcessContract
from connectors.contract.transfer_contract import TransferContract


class ConnectorContract(PrefixContract, TransferContract, DamageContract, PressureContract, ProcessContract, MediumContract):
    """All of it. After each test, whatever it did, nothing may be left: threads, descriptors, files, references."""

    harness_type: type[ConnectorHarness]

    def choose_harness(self, config: pytest.Config) -> type[ConnectorHarness]:
        """The harness of this run."""
        return self.harness_type

    @pytest.fixture
    def harness(self, tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[ConnectorHarness]:
        gc.collect()
        num_threads, descriptors = threading.active_count(), open_descriptors()
        harness = self.choose_harness(pytestconfig)(tmp_path)
        yield harness
        nodes = harness.close_nodes()
        assert [node.stats().num_open_references for node in nodes] == [0] * len(nodes)
        leftovers = harness.leftovers()
        harness.close()
        assert leftovers == []
        del nodes
        wait_until(lambda: threading.active_count() <= num_threads)
        gc.collect()
        assert open_descriptors() - descriptors == Counter()


def open_descriptors() -> Counter[str]:
    """What this process has open, by name; empty where the system does not tell."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the listing's own
            found[str(descriptor.readlink())] += 1
    return found
