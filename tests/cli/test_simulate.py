"""`paceline simulate`: what a study's results are shown and written as, and what it is refused for."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline.cli.studies
from paceline.cli.main import main
from paceline.cli.studies import simulate, write_study
from paceline.errors import ConfigError, PacelineError
from paceline.sim.study import load_study

SMALL = """
[study]
name = "small"
seeds = 1
steps = 1

[batch]
rollouts = 16
seq_len = 40000

[[workload]]
name = "answers"
[[workload.env]]
preset = "tailsieve"
group_size = 4

[[policy]]
name = "overlap"
"""


def written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_names_of_policies_and_workloads_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.replace('"overlap"', '"[/foo]\\u001b[2J:smile:"').replace('"answers"', '"[red]a"')
    out = tmp_path / "[/out]"
    assert main(["simulate", str(written(tmp_path, text)), "--processes", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "[/foo]\\x1b[2J:smile:" in said
    assert "[red]a" in said
    assert "[/out]/small.csv" in said
    assert sorted(path.suffix for path in out.iterdir())[:2] == [".csv", ".html"]


def test_results_are_shown_where_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paceline.cli.studies, "page", full)
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.csv").write_text("of before")
    assert main(["simulate", str(written(tmp_path)), "--processes", "1", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "trained tokens/s" in said.out
    assert f"cannot write {out / 'small.html'}: No space left on device" in said.err
    assert [path.read_text() for path in out.iterdir()] == ["of before"]


def test_a_directory_in_place_of_a_result_is_refused_before_a_study_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.csv").mkdir()
    endless = written(tmp_path, SMALL.replace("steps = 1", "steps = 1000000"))
    assert main(["simulate", str(endless), "--out", str(tmp_path)]) == 2
    assert "small.csv is a directory" in capsys.readouterr().err
    study = load_study(written(tmp_path))
    with pytest.raises(PacelineError, match=r"cannot write .*small\.csv: Is a directory"):
        write_study(study, simulate(study, processes=1), tmp_path)


def test_the_name_of_a_study_is_short_enough_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"study\.name"):
        load_study(written(tmp_path, SMALL.replace('"small"', f'"{"x" * 300}"')))
    study = load_study(written(tmp_path, SMALL.replace('"small"', f'"{"𝒳" * 60}"')))
    assert len(write_study(study, simulate(study, processes=1), tmp_path)) >= 2
