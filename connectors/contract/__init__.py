"""One suite that every connector passes, ours and other people's; contract.py says how to join."""

import pytest

pytest.register_assert_rewrite(
    *(f"connectors.contract.{name}_contract" for name in ("prefix", "damage", "transfer", "pressure", "process", "medium")),
    "connectors.contract.node",
)
