"""Documents that say which test shows what name tests that exist, and leave nothing out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CONTRACT = TESTS.parent / "connectors" / "contract"
NAME = re.compile(r"`([a-z0-9_]+)`")
DEFINITION = re.compile(r"^ *(?:async )?def ([a-z0-9_]+)\(", re.MULTILINE)


def table_of(document: Path) -> list[list[str]]:
    """The cells of its rows, without the heading."""
    rows = [line for line in document.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def check_names(document: Path) -> None:
    named = {name for row in table_of(document) for cell in row for name in NAME.findall(cell)}
    named |= {name for name in NAME.findall(document.read_text()) if name.startswith("test_")}
    defined = {
        name for folder in (TESTS, CONTRACT) for path in folder.rglob("*.py") for name in DEFINITION.findall(path.read_text())
    }
    assert len(named) > 50
    assert named <= defined, f"no such test: {sorted(named - defined)}"


def test_production_pains_every_named_test_exists() -> None:
    document = TESTS / "PRODUCTION_PAINS.md"
    check_names(document)
    assert all(any(NAME.search(cell) for cell in row) for row in table_of(document)), "a row without a test"


def test_faults_of_stores_every_cell_has_a_test_that_exists_or_says_why_not() -> None:
    document = TESTS / "fault" / "README.md"
    check_names(document)
    rows = table_of(document)
    assert len(rows) == 14 and {len(row) for row in rows} == {8}
    for fault, *cells in rows:
        assert all(NAME.search(cell) or cell.startswith("— ") for cell in cells), f"{fault}: a store without a test"


def test_scheduler_cases_each_of_the_forty_has_a_test_or_a_reason_that_exist() -> None:
    document = TESTS / "unit" / "core" / "SCHEDULER_CASES.md"
    check_names(document)
    rows = table_of(document)
    assert [row[0] for row in rows] == [str(number) for number in range(1, 41)]
    reasons = [row[0] for row in table_of(TESTS.parent / "ARCHITECTURE.md")]
    for number, _case, where in rows:
        quoted = re.findall(r'"([^"]+)"', where)
        assert quoted or NAME.search(where), f"case {number} is nowhere"
        assert ("differs" in where) == bool(quoted), f"case {number}"
        for words in quoted:
            assert any(reason.startswith(words) for reason in reasons), f"case {number}: no row begins with {words!r}"
