"""Cores of a process: how they are written, and that whoever claims some runs there, with all threads it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.config import NodeOptions
from core.cores import format_cores, parse_cores, usable_cores
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "cores"), [("", []), ("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), ("5,1-2, 2-3", [1, 2, 3, 5]), ("0,2,4-5", [0, 2, 4, 5])]
)
def test_cores_text_names_them_and_back(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(format_cores(cores)) == cores


def test_format_cores_neighbours_are_a_range() -> None:
    assert format_cores([8, 0, 1, 2]) == "0-2,8"
    assert format_cores([4, 5, 7]) == "4-5,7"


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0-9999", "1.5", "٣"])
def test_node_options_what_is_no_core_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.cpus.*such as 0-3,8"):
        NodeOptions(cpus=text)


_CLAIM = """
import os, sys, threading
from core.cores import claim_cores
if hasattr(os, "sched_setaffinity"):
    core = max(os.sched_getaffinity(0))
    claim_cores([core])
    seen = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert seen == [{core}], seen
    try:
        claim_cores([core, core + 1])
    except OSError as error:
        assert f"may use the cores {core}" in str(error), error
    else:
        raise AssertionError("claimed a core that is not there")
print("done")
"""


def test_claim_cores_threads_inherit_and_others_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _CLAIM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


def test_usable_cores_are_some() -> None:
    assert usable_cores() == sorted(set(usable_cores())) != []
