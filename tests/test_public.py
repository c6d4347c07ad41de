"""Public names are listed in `__all__`, and the lists are true."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1] / "src"
INITS = sorted(ROOT.glob("paceline/**/__init__.py"))
NEEDS_TORCH = ("paceline.trainer", "paceline.engines.embedded")


def name_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


def listed(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def imported(path: Path) -> set[str]:
    """Public names that an `__init__` takes over from its own modules, and does not need itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(name_of(path) + "."):
            found.update(alias.asname or alias.name for alias in node.names)
    used = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    return {name for name in found if not name.startswith("_")} - used


def load(name: str) -> ModuleType:
    if name.startswith(NEEDS_TORCH):
        pytest.importorskip("torch")
    return importlib.import_module(name)


@pytest.mark.parametrize("path", [p for p in INITS if listed(p) is not None], ids=name_of)
def test_what_a_package_lists_is_what_it_offers(path: Path) -> None:
    names = listed(path)
    assert names is not None
    assert len(set(names)) == len(names)
    package = load(name_of(path))
    assert not [name for name in names if not hasattr(package, name)], "listed, but not there"
    assert not imported(path) - set(names), "there, but not listed"


@pytest.mark.parametrize("path", INITS, ids=name_of)
def test_a_package_that_offers_names_lists_them(path: Path) -> None:
    assert listed(path) is not None or not imported(path)


def test_every_public_name_of_the_test_kit_says_what_it_is() -> None:
    kit = importlib.import_module("paceline.testing")
    silent = [name for name in kit.__all__ if not (getattr(kit, name).__doc__ or "").strip()]
    assert not silent
