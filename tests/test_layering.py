"""Reads every import of the package and fails when an arrow of `docs/architecture.md` ("The rooms") turns round."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
EVERYWHERE = {"errors"}
MAY = {
    "assets": set(),
    "errors": set(),
    "domain": set(),
    "config": {"domain"},
    "core": {"domain", "config"},
    "ports": {"domain"},
    "tokens": {"domain"},
    "envs": {"domain", "tokens", "ports", "config"},
    "runtime": {"domain", "config", "core", "ports", "tokens", "envs"},
    "engines": {"domain", "ports", "config"},
    "transport": {"domain", "ports"},
    "trainer": {"transport"},
    "journal": {"domain", "ports"},
    "observe": {"domain", "config"},
    "sim": {"domain", "config", "core", "ports"},
}
"""What each room may import, beside itself. `cli` and `testing` may import all, and the top-level names come from it."""

ALL = {"cli", "testing", "__init__", "__main__"}
PURE = {"domain", "core"}
IMPURE = {
    *("asyncio", "concurrent", "threading", "multiprocessing", "subprocess", "signal", "queue", "selectors"),
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "io", "pathlib", "shutil", "tempfile", "socket", "ssl", "http", "urllib", "aiohttp"),
    *("logging", "sys", "warnings", "pickle", "torch", "transformers"),
}
HEAVY = ("torch", "transformers", "safetensors")
EXTRAS = ("ray", "pyarrow", "reasoning_gym", "textarena", "verifiers")
"""What optional extras for environments install: none is imported unless it is used."""


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it; those only for type checking too."""
    found: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names if module == "paceline")
    return found


def room(dotted: str) -> str | None:
    """The room of a module of ours; None for everybody else's."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "paceline" and len(parts) > 1 else None


FILES = sorted(ROOT.glob("paceline/**/*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    mine = path.relative_to(ROOT).with_suffix("").parts[1]
    if mine in ALL:
        return
    assert mine in MAY, f"{mine} is a new room: say in docs/architecture.md and here what it may import"
    rooms = {r for name in imports(path) if (r := room(name)) is not None}
    turned = rooms - MAY[mine] - EVERYWHERE - {mine}
    assert not turned, f"{mine} must not import {', '.join(sorted(turned))}"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.relative_to(ROOT).parts[1] in PURE],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_decides_knows_no_clock_no_chance_and_no_outside(path: Path) -> None:
    impure = {name for name in imports(path) if name.split(".")[0] in IMPURE}
    assert not impure


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_random_numbers_of_numpy_are_keyed(path: Path) -> None:
    """`np.random` without a generator is shared state: a change in one place reshuffles all others."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            of_numpy = node.value.attr == "random" and ast.unparse(node.value) in (
                "np.random",
                "numpy.random",
            )
            assert not of_numpy or node.attr in ("Generator", "Philox"), ast.unparse(node)


def test_everything_but_the_trainer_and_the_embedded_engine_works_without_torch_and_extras() -> None:
    modules = []
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        heavy = "trainer" in parts or "embedded" in parts or parts in (("paceline", "cli", "engine"),)
        heavy = heavy or parts[-1] == "__main__"
        heavy = (
            heavy or parts[-1] == "verifiers_parts"
        )  # imported inside another package alone, where that is
        if not heavy:
            modules.append(".".join(part for part in parts if part != "__init__"))
    code = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY + EXTRAS!r}:
            raise ImportError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Blocked())
for name in {modules!r}:
    importlib.import_module(name)
print(len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
