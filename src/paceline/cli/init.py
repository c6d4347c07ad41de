"""`paceline init NAME`: a package with an environment of your own, which trains as it is."""

from __future__ import annotations

import argparse
import keyword
from importlib.resources import files
from pathlib import Path

from paceline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the package, and of the folder it is made in")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="where to make the folder (here)"
    )


def run(args: argparse.Namespace) -> int:
    made = scaffold(args.name, args.dir)
    print(f"{made}: an environment, a config and tests. Next:\n")
    print(
        f"  cd {made}\n  paceline env check run.toml\n  pytest            # trains three steps; needs `pip install pytest`\n  paceline run run.toml"
    )
    return 0


def scaffold(name: str, where: Path) -> Path:
    """Write the package; returns its folder. ConfigError when the name is none, or something is there already."""
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r} is no name for a Python package: letters, digits and _, not a digit first"
        )
    folder = where / name
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already, and not empty: choose another name, or --dir")
    title = "".join(part.capitalize() for part in module.split("_")) or "My"
    templates = files("paceline.assets") / "scaffold"
    for source, target in (
        ("pyproject.toml.txt", "pyproject.toml"),
        ("README.md.txt", "README.md"),
        ("run.toml.txt", "run.toml"),
        ("environment.py.txt", f"{module}/__init__.py"),
        ("test_environment.py.txt", f"tests/test_{module}.py"),
        ("conftest.py.txt", "tests/conftest.py"),
    ):
        text = (templates / source).read_text(encoding="utf-8")
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("@NAME@", name).replace("@MODULE@", module).replace("@CLASS@", title),
            encoding="utf-8",
        )
    return folder
