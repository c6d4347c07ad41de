"""A recorded run answers for other settings: its rollouts and its engines, simulated again."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from sim_kit import Kept, simulation

from paceline.cli.main import main
from paceline.cli.studies import simulate
from paceline.cli.what_if import records_of, study_of_run, workload_of_run
from paceline.config import RunConfig
from paceline.config.dump import dump
from paceline.core.admission import FixedCap
from paceline.errors import ConfigError
from paceline.journal import FileJournal
from paceline.sim.calibrate import Calibration, RecordedEngines, calibrate, recorded_engines
from paceline.sim.cells import build
from paceline.sim.engine import Speed
from paceline.sim.measure import Measure
from paceline.sim.metrics import summarize
from paceline.sim.study import SimEnv, StudyConfig
from paceline.sim.workloads import Recorded, RolloutPlan

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
        **{"batch": 48, "max_steps": 3} | changes,
        folds=[kept, measure],
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
            "engines": {"count": 2, "recorded": str(engines) if engines else ()},
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


def with_config(folder: Path, cap: int = CAP, group_size: int = 4, **more: Any) -> Path:
    """What a run directory keeps of its config."""
    config = RunConfig.model_validate(
        {
            "model": {"name": "any"},
            "sampling": {"max_tokens": 1},
            "env": [{"id": "any:env", "name": "env", "group_size": group_size}],
            "scheduling": {"type": "overlap", "lag": 1, "max_staleness": 8},
            "admission": {"type": "fixed", "cap": cap},
            "batch": {"rollouts": 48, "seq_len": 1 << 16},
            "trainer": {"type": "external"},
        }
        | more
    )
    (folder / "config.toml").write_text(dump(config))
    return folder


def test_a_recorded_run_needs_no_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    goodput = record(tmp_path / "run", "search", max_steps=5)
    run = with_config(tmp_path / "run")
    study, engines = study_of_run(run)
    assert engines == recorded_engines(records_of(run), study.engines.max_batched_tokens)
    assert [policy.name for policy in study.policy] == ["as recorded", "cap 6", "cap 24"]
    assert (study.study.steps, study.engines.count, study.batch.rollouts) == (5, 2, 48)
    assert study.trainer.step_s == pytest.approx(5.0, rel=0.01)
    assert study.weights.load_s == pytest.approx(2.0, rel=0.01)
    cells = simulate(study, processes=1)
    assert cells[0].numbers["goodput"] == pytest.approx(goodput, rel=0.10)
    assert cells[1].numbers["goodput"] < cells[0].numbers["goodput"]
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--from", "run", "--processes", "1", "--policy", "as recorded"]) == 0
    assert (tmp_path / "studies" / "run-what-if.csv").is_file()
    assert f"{cells[0].numbers['goodput']}" in (tmp_path / "studies" / "run-what-if.csv").read_text()
    out = capsys.readouterr().out
    untold = recorded_engines(records_of(run)).calibration.untold
    assert ("not told what " + ", ".join(untold) in out) == bool(untold)


def test_what_a_fit_could_not_tell_is_said(
    runs: dict[str, tuple[Path, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = runs["search"][0]
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.setattr(Calibration, "untold", property(lambda self: ["a step", "a request"]))
    args = ["simulate", str(tmp_path / "study.toml"), "--processes", "1", "--out", str(tmp_path)]
    assert main([*args, "--engines-from", str(where)]) == 0
    assert "not told what a step, a request costs" in capsys.readouterr().out


def test_engines_may_be_told_by_several_runs_and_are_fitted_once(
    runs: dict[str, tuple[Path, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (runs[name][0] for name in sorted(runs)[:2])
    (tmp_path / "study.toml").write_text(STUDY.replace("seeds = 1", "seeds = 2"))
    fits = []

    def fitted(*args: Any) -> RecordedEngines:
        fits.append(recorded_engines(*args))
        return fits[-1]

    for module in ("paceline.sim.cells", "paceline.cli.what_if"):
        monkeypatch.setattr(f"{module}.recorded_engines", fitted)
    args = ["simulate", str(tmp_path / "study.toml"), "--processes", "1", "--out", str(tmp_path)]
    assert (
        main([*args, "--engines-from", str(one), "--engines-from", str(other), "--engines-from", str(one)])
        == 0
    )
    (fit,) = fits
    assert fit.calibration == calibrate(chain(records_of(one), records_of(other)))
    assert fit.calibration.requests > calibrate(records_of(one)).requests
    assert main([*args, "--from", str(one), "--engines-from", str(other)]) == 0
    assert len(fits) == 2


def test_a_run_that_is_given_twice_is_calibrated_by_once(
    runs: dict[str, tuple[Path, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(runs["search"][0])
    assert main(["calibrate", where, f"{where}/."]) == 0
    told = capsys.readouterr().out
    assert main(["calibrate", where]) == 0
    assert capsys.readouterr().out == told


def test_a_run_that_tells_too_little_for_a_study_of_its_own_is_refused(
    runs: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    where = runs["search"][0]
    with pytest.raises(ConfigError, match=r"config\.toml is not there"):
        study_of_run(where)
    record(tmp_path / "two-steps", "search")
    with pytest.raises(ConfigError, match="trained steps that count"):
        study_of_run(with_config(tmp_path / "two-steps"))
    record(tmp_path / "few", "code-single", cap=2, batch=4, max_steps=1)
    with pytest.raises(ConfigError, match="a fit takes 40"):
        study_of_run(with_config(tmp_path / "few"))


def test_a_run_whose_admission_follows_the_load_is_taken_as_it_was(tmp_path: Path) -> None:
    record(tmp_path, "search", max_steps=5)
    scheduling = {"type": "unbiased_tail", "cutoff_tokens": 1000}
    servers = {"type": "vllm", "urls": ["http://127.0.0.1:1"]}
    changes = {
        "admission": {"type": "predictive"},
        "scheduling": scheduling,
        "engine": servers,
        "algorithm": {"name": "mine:Algorithm"},
    }
    (policy,) = study_of_run(with_config(tmp_path, **changes))[0].policy
    assert (policy.name, policy.admission.type, policy.algorithm.name) == (
        "as recorded",
        "predictive",
        "rloo",
    )
    assert policy.scheduling.model_dump()["late"] == "resume"  # of servers; a study names none


def test_groups_are_as_large_as_they_were(
    runs: dict[str, tuple[Path, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = runs["search"][0]
    said = study(where, None, CAP)
    (workload,), (policy,) = said.workload, said.policy
    wrong = workload.model_copy(update={"env": (SimEnv(journal=str(where), group_size=16),)})
    with pytest.raises(ConfigError, match=r"group_size 16, and the recorded run has groups of 4"):
        simulate(said.model_copy(update={"workload": (wrong,)}), processes=1)
    silent = workload.model_copy(update={"env": (SimEnv(journal=str(where)),)})
    world = build(said, policy, silent, 1, journals=lambda name: records_of(Path(name)))
    assert world.core.setup.train[0].group_size == 4
    (tmp_path / "study.toml").write_text(STUDY.replace("group_size = 4", "group_size = 16"))
    args = ["simulate", str(tmp_path / "study.toml"), "--processes", "1", "--out", str(tmp_path)]
    assert main([*args, "--from", str(where)]) == 0  # the study's workloads are replaced, sizes and all
    capsys.readouterr()


def test_environments_of_a_run_stay_apart() -> None:
    one, other = plan("one"), plan("other")
    recorded = Recorded({"one": [[one, one]], "other": [[other] * 4]})
    assert recorded.named("other").groups == {"other": [[other] * 4]}
    assert (recorded.named("one").sizes, recorded.sizes) == ({"one": 2}, {"one": 2, "other": 4})
    with pytest.raises(ConfigError, match="the environments 'one', 'other', and none is called 'recorded'"):
        recorded.named("recorded")
    assert recorded.named("one").named("recorded").groups == {"recorded": [[one, one]]}
    envs = workload_of_run(Path("runs/both"), recorded).env
    assert [(env.label, env.group_size) for env in envs] == [("one", 2), ("other", 4)]


def plan(name: str) -> RolloutPlan:
    return RolloutPlan(prompt=len(name), turns=((0.0, 0, 5),))


def test_what_a_recorded_run_cannot_tell_is_said(tmp_path: Path) -> None:
    record(tmp_path / "short", "code-single", group_size=4, seed=5)
    silent = study(tmp_path / "short", tmp_path / "short", CAP)
    told = silent.model_copy(update={"engines": silent.engines.model_copy(update={"kv_tokens": 10})})
    with pytest.raises(ConfigError, match="does not fit an engine of 10"):
        simulate(told, processes=1)
