"""The storm finds the faults that `docs/chaos.md` says it finds, with the seeds that stand there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "plant_faults.py"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plant_faults", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLANTED = tool()


def test_every_fault_has_a_seed_that_finds_it() -> None:
    assert set(PLANTED.recorded()) == set(PLANTED.FAULTS)


@pytest.mark.parametrize("name", PLANTED.FAULTS)
def test_a_planted_fault_is_found_by_its_seed(name: str) -> None:
    assert PLANTED.find(PLANTED.FAULTS[name], PLANTED.recorded()[name], 1) is not None
