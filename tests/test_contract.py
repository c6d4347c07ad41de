"""Every rule of `docs/contract.md` stands on a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
CONTRACT = TESTS.parent / "docs" / "contract.md"


def test_every_test_that_the_contract_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", CONTRACT.read_text()))
    there = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 50
    assert not named - there


def test_rules_are_numbered_through() -> None:
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", CONTRACT.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
