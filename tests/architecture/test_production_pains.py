"""The table of known production failures names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CONTRACT = TESTS.parent / "connectors" / "contract"
NAME = re.compile(r"`([a-z0-9_]+)`")
DEFINITION = re.compile(r"^ *(?:async )?def ([a-z0-9_]+)\(", re.MULTILINE)


def test_production_pains_every_named_test_exists() -> None:
    rows = [line for line in (TESTS / "PRODUCTION_PAINS.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows[1:] for name in NAME.findall(row)}
    defined = {
        name for folder in (TESTS, CONTRACT) for path in folder.rglob("*.py") for name in DEFINITION.findall(path.read_text())
    }
    assert len(named) > 50
    assert named <= defined, f"no such test: {sorted(named - defined)}"
    assert all(NAME.search(row) for row in rows[1:]), "a row without a test"
