"""Hypothesis profiles: what CI runs by default, and `--hypothesis-profile=long` (with `--timeout=7200`) for a night.

And the CPU kernels are there before the first test that computes with them.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.examples import CI_EXAMPLES, LONG_EXAMPLES

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

for _name, _max_examples in (("ci", CI_EXAMPLES), ("long", LONG_EXAMPLES)):
    settings.register_profile(
        _name,
        max_examples=_max_examples,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=_QUIET,
    )
settings.load_profile("ci")

_TESTS = Path(__file__).parent
_WITH_MODEL = tuple(_TESTS / name for name in ("unit/core/model", "e2e", "fault"))  # may compute with the model


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the kernels, once for this machine: not within the time of the first test or node that needs them."""
    if session.config.option.collectonly or not any(
        item.path.is_relative_to(room) for item in session.items for room in _WITH_MODEL
    ):
        return
    from core.config import user_cache_dir
    from core.model.native.build import SOURCES, find_or_build

    with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):  # tests of the kernels say what is wrong
        find_or_build(user_cache_dir() / "native", SOURCES)
