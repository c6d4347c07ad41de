"""The documentation is true: links lead somewhere, code compiles, configs load, examples pass their own tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.cli.checks import checks_of
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.config.reference import markdown
from paceline.runtime.doctor import Finding
from paceline.sim.page import NUMBERS, PAIRED
from paceline.sim.study import load_study

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')

BASE = '[model]\nname = "pkg:paceline/assets/small_policy"\n\n[[env]]\nid = "reverse-text"\n'
"""What a config that shows one section leaves out."""

LAID_OVER = ("mix.toml",)
"""Configs that are no runs by themselves."""


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; a title is the name of the file to save one as."""
    for language, info, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        title = _TITLE.search(info)
        yield Block(language, title[1] if title else "", text)


def save_examples(page: Path, folder: Path) -> list[str]:
    """Write the titled blocks of a page into `folder`; returns their names."""
    titled = [block for block in blocks_of(page) if block.title]
    for block in titled:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    return [block.title for block in titled]


def run_file(path: Path) -> dict[str, Any]:
    """Run a Python file; returns what it defined."""
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), names)
    return names


def of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = [link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.title}", "exec")


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_config_loads_strictly(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks_of(page)):
        if block.language == "toml":
            base, shown = tmp_path / "base.toml", tmp_path / f"{number}.toml"
            base.write_text(BASE, encoding="utf-8")
            shown.write_text(block.text, encoding="utf-8")
            if "[study]" in block.text:
                load_study(shown)
            else:
                load(RunConfig, [base, shown])


def test_the_reference_of_options_is_up_to_date() -> None:
    written = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert written == markdown(RunConfig), "make docs writes it anew"


def test_the_reference_of_studies_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--study"]) == 0
    written = (ROOT / "docs" / "reference" / "study.md").read_text(encoding="utf-8")
    assert written == capsys.readouterr().out, "make docs writes it anew"


def test_every_number_that_a_study_shows_is_explained() -> None:
    guide = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    for name, each in NUMBERS.items():
        assert f"| {each.title} | `{name}` | {each.meaning} |" in guide
    for title in PAIRED.values():
        assert f"| {title} |" in guide


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader would save the examples and stand. Modules imported from it are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", GUIDES, ids=of)
def test_examples_of_a_guide_pass_their_own_tests(page: Path, folder: Path) -> None:
    for name in save_examples(page, folder):
        if name.startswith("test_"):
            for key, test in run_file(folder / name).items():
                if key.startswith("test_"):
                    test(folder) if test.__code__.co_argcount else test()


@pytest.mark.parametrize(
    "config",
    [
        *ROOT.glob("examples/*/run.toml"),
        *(page for page in GUIDES if page.stem in ("environments", "algorithms")),
    ],
    ids=of,
)
def test_what_a_config_names_is_there(config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments and algorithms of the examples are imported and made, as `paceline doctor` does it."""
    files = [config]
    monkeypatch.syspath_prepend(str(config.parent))  # where the command line looks, too
    if config.suffix == ".md":
        names = save_examples(config, folder)
        files = [folder / name for name in names if name.endswith(".toml") and name not in LAID_OVER]
        if "make_data.py" in names:
            run_file(folder / "make_data.py")
    for file in files:
        checks = checks_of(load(RunConfig, [file]))
        found: list[Finding] = [
            finding
            for name, check in checks.items()
            if name.startswith(("env", "eval", "algorithm", "services"))
            for finding in check()  # type: ignore[union-attr]
        ]
        assert found
        assert [finding for finding in found if finding.level == "error"] == []
