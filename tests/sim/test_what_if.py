"""A recorded run answers for other settings: its rollouts and its engines, simulated again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sim_kit import Kept, simulation

from paceline.cli.main import main
from paceline.cli.studies import simulate
from paceline.core.admission import FixedCap
from paceline.errors import ConfigError
from paceline.journal import FileJournal
from paceline.sim.engine import Speed
from paceline.sim.metrics import Measure, summarize
from paceline.sim.study import StudyConfig

TRUTH = Speed(kv_tokens=300_000, max_model_len=40_000, kv_s=2e-7)
"""Engines that the recorded runs had; nobody tells the simulator."""

CAP = 12


def record(folder: Path, preset: str, *, cap: int = CAP, **changes: Any) -> float:
    """Leave the journal of a short run; its goodput."""
    kept, measure = Kept(), Measure()
    simulation(
        preset,
        speed=TRUTH,
        admission=FixedCap(cap),
        train_s=5.0,
        batch=48,
        max_steps=3,
        folds=[kept, measure],
        **changes,
    ).run()
    found = summarize(measure)
    assert found is not None

    async def write() -> None:
        journal = FileJournal(folder, "run")
        for entry in kept.entries:
            journal.append(*entry)
        await journal.close()

    asyncio.run(write())
    return found.goodput


def study(rollouts: Path, engines: Path | None, *caps: int) -> StudyConfig:
    return StudyConfig.model_validate(
        {
            "study": {"seeds": 1, "steps": 3, "zero_signal": True},
            "engines": {"count": 2, "recorded": str(engines) if engines else None},
            "batch": {"rollouts": 48, "seq_len": 1 << 16},
            "trainer": {"step_s": 5.0},
            "weights": {"load_s": 2.0},
            "workload": [{"name": "recorded", "env": [{"journal": str(rollouts), "group_size": 4}]}],
            "policy": [
                {
                    "name": str(cap),
                    "scheduling": {"type": "overlap", "lag": 1, "max_staleness": 8},
                    "admission": {"type": "fixed", "cap": cap},
                }
                for cap in caps
            ],
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    root = tmp_path_factory.mktemp("recorded")
    return {name: (root / name, record(root / name, name)) for name in ("search", "code-single")}


def test_a_recorded_run_is_told_as_fast_as_it_was(runs: dict[str, tuple[Path, float]]) -> None:
    where, goodput = runs["search"]
    (cell,) = simulate(study(where, where, CAP), processes=1)
    assert cell.numbers["goodput"] == pytest.approx(goodput, rel=0.10)


def test_engines_fitted_to_one_workload_tell_how_fast_another_is(
    runs: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    (fitted, _), (other, goodput) = runs["search"], runs["code-single"]
    (cell,) = simulate(study(other, fitted, CAP), processes=1)
    assert cell.numbers["goodput"] == pytest.approx(goodput, rel=0.10)


def test_what_if_there_were_fewer_at_once(runs: dict[str, tuple[Path, float]], tmp_path: Path) -> None:
    where, goodput = runs["search"]
    fewer = record(tmp_path / "fewer", "search", cap=3)
    assert fewer < 0.8 * goodput
    (cell,) = simulate(study(where, where, 3), processes=1)
    assert cell.numbers["goodput"] == pytest.approx(fewer, rel=0.15)


STUDY = """
[study]
name = "what-if"
seeds = 1
steps = 2

[batch]
rollouts = 32
seq_len = 60000

[[workload]]
name = "replaced"
[[workload.env]]
preset = "search"
group_size = 4
"""


def test_the_command_line_takes_rollouts_and_engines_of_a_run(
    runs: dict[str, tuple[Path, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = runs["search"][0]
    (tmp_path / "study.toml").write_text(STUDY)
    args = ["simulate", str(tmp_path / "study.toml"), "--processes", "1", "--out", str(tmp_path)]
    assert main([*args, "--from", str(where), "--engines-from", str(where)]) == 0
    assert "search" in capsys.readouterr().out.splitlines()[0] + (tmp_path / "what-if.csv").read_text()
    assert f"as in {where}" in (tmp_path / "what-if.html").read_text()
    assert main([*args, "--engines-from", str(tmp_path / "nowhere")]) != 0
    assert "no run at" in capsys.readouterr().err


def test_what_a_recorded_run_cannot_tell_is_said(tmp_path: Path) -> None:
    record(tmp_path / "short", "code-single", group_size=4, seed=5)
    silent = study(tmp_path / "short", tmp_path / "short", CAP)
    told = silent.model_copy(update={"engines": silent.engines.model_copy(update={"kv_tokens": 10})})
    with pytest.raises(ConfigError, match="does not fit an engine of 10"):
        simulate(told, processes=1)
