"""How many examples a fuzz test runs: each has its share in CI, and the long profile multiplies all alike."""

from __future__ import annotations

from hypothesis import settings

CI_EXAMPLES = 100
LONG_EXAMPLES = 5_000


def num_examples(in_ci: int) -> int:
    """max_examples of a test under the profile that is loaded. Call at import, after pytest has chosen the profile."""
    return max(1, in_ci * settings.default.max_examples // CI_EXAMPLES)
