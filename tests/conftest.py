"""Hypothesis profiles: what CI runs by default, and `--hypothesis-profile=long` (with `--timeout=7200`) for a night."""

from __future__ import annotations

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
