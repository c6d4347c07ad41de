"""Studies: every file that ships can be read and built, a cell repeats, and what is wrong is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from paceline.cli.studies import simulate
from paceline.errors import ConfigError, NoProgressError
from paceline.sim.cells import Cell, Spread, build, paired, run_cell
from paceline.sim.engine import EngineModel, SplitEngine
from paceline.sim.page import against_first, page
from paceline.sim.study import DEAD_GROUPS, StudyConfig, load_study

STUDIES = sorted((Path(__file__).parents[2] / "examples" / "studies").glob("*.toml"))

SMALL = """
[study]
name = "small"
seeds = 2
steps = 2
sample_s = 5

[batch]
rollouts = 16
seq_len = 40000

[trainer]
step_s = 5

[[workload]]
name = "answers"
[[workload.env]]
preset = "tailsieve"
group_size = 4

[[policy]]
name = "synchronous"
scheduling = { type = "synchronous" }

[[policy]]
name = "overlap"
scheduling = { type = "overlap", lag = 1 }
"""


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_that_ships_can_be_run(path: Path) -> None:
    study = load_study(path)
    for workload in study.workload:
        for policy in study.policy:
            simulation = build(study, policy, workload, 1)
            simulation.run(events=400)
            assert simulation.events >= 400


def test_a_study_writes_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert main(["simulate", str(tmp_path / "small.toml"), "--processes", "1", "--out", str(tmp_path)]) == 0
    assert "synchronous" in capsys.readouterr().out
    table = (tmp_path / "small.csv").read_text().splitlines()
    assert len(table) == 1 + 2 * 2
    written = (tmp_path / "small.html").read_text()
    assert written.count("<svg") > 5
    assert "http" not in written


@pytest.mark.parametrize(
    ("ends", "steps", "seconds"),
    [
        ("steps = 2", 2, None),
        ("seconds = 60", None, 60.0),
        ("steps = 2\nseconds = 60", 2, 60.0),
        ("", 5, None),
    ],
)
def test_a_run_ends_after_the_steps_or_the_seconds_that_a_study_gives(
    tmp_path: Path, ends: str, steps: int | None, seconds: float | None
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("steps = 2", ends))
    study = load_study(tmp_path / "small.toml")
    assert (study.study.most_steps, study.study.seconds) == (steps, seconds)
    if steps != 5:
        policy, workload = study.policy[0], study.workload[0]
        numbers = run_cell(study, policy, workload, 1).numbers
        assert numbers["steps"] == 2 if seconds is None else numbers["seconds"] <= seconds


def test_a_cell_repeats_and_overlapping_takes_less_time(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    cells = simulate(tmp_path / "small.toml", processes=1)
    again = simulate(tmp_path / "small.toml", processes=2)
    for a, b in zip(cells, again, strict=True):
        assert {k: v for k, v in a.numbers.items() if k != "cpu_s"} == {
            k: v for k, v in b.numbers.items() if k != "cpu_s"
        }
    faster = paired(cells, "overlap", "synchronous", "step_s", "answers")
    assert faster is not None
    assert faster.mean > 1.0
    assert page("small", cells, ()).startswith("<!doctype html>")


def cell(policy: str, seed: int, workload: str = "w", **numbers: float) -> Cell:
    return Cell(policy, workload, seed, dict(numbers))


def test_policies_are_held_against_the_first_of_a_study_seed_by_seed(tmp_path: Path) -> None:
    """Of two seeds that differ far more than policies do, what is paired says which is better, and by how much."""
    cells = [
        cell("base", 1, goodput=100.0, step_s=10.0, tail_s=4.0),
        cell("fast", 1, goodput=150.0, step_s=5.0),
        cell("slow", 1, goodput=80.0, step_s=20.0, tail_s=8.0),
        cell("base", 2, goodput=1000.0, step_s=30.0, tail_s=2.0),
        cell("fast", 2, goodput=1500.0, step_s=15.0),
        cell("slow", 2, goodput=800.0, step_s=60.0, tail_s=2.0),
        cell("base", 1, "other", goodput=3.0),
    ]
    found = against_first(cells, "w")
    assert list(found) == ["goodput", "step_s", "tail_s"]
    assert found["goodput"] == {"fast": Spread(1.5, 0.0), "slow": Spread(0.8, 0.0)}
    assert found["step_s"] == {"fast": Spread(2.0, 0.0), "slow": Spread(0.5, 0.0)}
    assert set(found["tail_s"]) == {"slow"}
    assert found["tail_s"]["slow"].mean == 0.75
    assert against_first(cells, "other") == {}
    written = page("<s>", cells, ())
    assert "By base, seed by seed" in written
    # A policy a column, in each: one that lacks a number has an empty cell, and the others keep theirs.
    assert "<tr><td>tails, times as fast</td><td></td><td>0.750 <small>±3.18</small></td></tr>" in written
    assert "<tr><th></th><th>base</th><th>fast</th><th>slow</th></tr>" in written
    assert "<s>" not in written.replace("<small>", "")
    # A policy has one colour, also where another before it lacks the number.
    bars = written[written.index("tail, s</figcaption>") :]
    assert re.findall(r"fill='(#\w+)' rx", bars[: bars.index("</svg>")]) == ["#2563eb", "#059669"]


POOL = """
import os, time
from paceline.cli.studies import processes_of

if __name__ == "__main__":
    with processes_of(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 3600).result()
"""


BIAS = """
[study]
steps = 40

[batch]
rollouts = 16
seq_len = 40000

[trainer]
step_s = 5

[[workload]]
name = "two kinds"
[[workload.env]]
name = "long"
reasoning = { median = 300, sigma = 1.2, cap = 4000 }
group_size = 4
[[workload.env]]
name = "short"
reasoning = { median = 50, sigma = 0.2, cap = 100 }
group_size = 4

[[policy]]
name = "overlap"
scheduling = { type = "overlap", lag = 2, max_staleness = 64 }

[[policy]]
name = "overlap, stale dropped"
scheduling = { type = "overlap", lag = 2, max_staleness = 2 }

[[policy]]
name = "discard"
scheduling = { type = "overprovision", late = "discard" }
"""


def test_what_is_under_way_at_the_end_is_no_bias_and_what_is_thrown_away_is(tmp_path: Path) -> None:
    """Long answers are under way when a window ends. They are not missing: they train later. And an environment with long answers is
    compared with itself."""
    file = tmp_path / "bias.toml"
    file.write_text(BIAS)
    study = load_study(file)
    kept, dropped, discarded = (
        run_cell(study, policy, study.workload[0], 1).numbers for policy in study.policy
    )
    assert kept["wasted_share"] == 0.0
    assert (kept["length_mean"], kept["length_ks"], kept["unvisited_share"]) == (0.0, 0.0, 0.0)
    assert dropped["length_mean/long"] < -0.2
    assert dropped["length_mean"] > dropped["length_mean/long"]
    assert discarded["length_mean/long"] < -0.1
    assert min(dropped["unvisited_share"], discarded["unvisited_share"]) > 0.02
    assert discarded["wasted_share"] > 0.1


def test_processes_of_a_study_end_with_one_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(POOL, "utf-8")
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([worker], timeout=240)[1] == []


def test_what_is_wrong_with_a_study_is_named(tmp_path: Path) -> None:
    for broken, said in (
        (SMALL.replace("tailsieve", "tailsive"), "no preset 'tailsive'"),
        (SMALL.replace('name = "overlap"', 'name = "synchronous"'), "two sections of policy"),
        (SMALL + "\n[engines]\nmodel = 'gpt'\n", "engines.model 'gpt' is not known"),
        (SMALL + "\n[engines]\nmodel = 'qwen2.5-72b'\n", None),
        (SMALL.replace("steps = 2", "stepz = 2"), "stepz"),
    ):
        (tmp_path / "broken.toml").write_text(broken)
        with pytest.raises(ConfigError, match=said or "take more GPUs an engine"):
            first_cell(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("[engines]\nshared_kv_gb_s = 40\nprefill = {}", "policy 'synchronous': engines.shared_kv_gb_s brings KV"),
        ("[engines]\nrecorded = 'x'\nprefill = {}", "prefill needs to know the model"),
        ("[engines]\nrecorded = 'x'\nspeculation = {}", "speculation needs to know the model"),
        ("[engines]\nprefill = { gpu = 'P100' }", "prefill.gpu 'P100' is not known"),
        ("[engines]\nkv_tokens = 90000\nmax_num_seqs = 8\n[engines.prefill]\ngpu='T'\n[gpus.T]\ntflops=1\nbandwidth_tb_s=1\nmemory_gb=22",
         "does not fit a prefill engine of"),
        ("[engines]\nmax_model_len = 1000", "a context may come to 21184 tokens, and an engine takes 1000: raise engines.max_model_len"),
        ("[engines]\nexpert_parallel = true", "the model is dense, and has no experts"),
        ("[engines]\nmodel='moe'\nexpert_parallel = true\n[models.moe]\nlayers=2\nheads=2\nparams_b=4\nactive_b=1\nexperts=8",
         "does not say what a token sends them"),
    ],
)  # fmt: skip
def test_options_of_engines_that_disagree_are_refused(tmp_path: Path, added: str, said: str) -> None:
    (tmp_path / "broken.toml").write_text(f"{SMALL}\n{added}\n")
    with pytest.raises(ConfigError, match=said):
        first_cell(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("engine_lost_at_s = [5, -100]", r"engine_lost_at_s\[1\] is -100, and a run goes from 0 s on: give seconds"),
        ("engine_lost_at_s = [nan]", r"engine_lost_at_s\[0\] is nan, and a run goes from 0 s on"),
        ("engine_lost_at_s = [inf]", r"engine_lost_at_s\[0\] is inf, and a run goes from 0 s on"),
        ("engine_lost_at_s = [5, 6]", "has 2 times, and engines.count or the policy gives 1: give at most one"),
        ("engine_back_s = nan", "faults.engine_back_s"),
        ("call = nan", "faults.call"),
    ],
)  # fmt: skip
def test_faults_that_cannot_come_are_refused(tmp_path: Path, added: str, said: str) -> None:
    (tmp_path / "broken.toml").write_text(f"{SMALL}\n[faults]\n{added}\n")
    with pytest.raises(ConfigError, match=said):
        load_study(tmp_path / "broken.toml")


def test_an_engine_that_is_lost_for_good_can_be_written_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(f"{SMALL}\n[faults]\nengine_lost_at_s = [5]\nengine_back_s = inf\n")
    study = load_study(tmp_path / "small.toml")
    assert StudyConfig.model_validate(study.model_dump()) == study


def test_a_policy_may_split_its_engines_and_speculate(tmp_path: Path) -> None:
    apart = (
        "\nengines = 1\nprefill = { count = 2, gpus = 2, link_gb_s = 10 }\nspeculation = { off_above = 4 }\n"
    )
    (tmp_path / "small.toml").write_text(SMALL + apart)
    study = load_study(tmp_path / "small.toml")
    plain, split = (build(study, policy, study.workload[0], 1).engines for policy in study.policy)
    assert isinstance(plain["e0"], EngineModel)
    (engine,) = split.values()
    assert isinstance(engine, SplitEngine)
    assert [each.speed.kv_tokens > 2 * engine.speed.kv_tokens for each in engine.prefill] == [True, True]
    assert engine.speed.speculation is not None
    assert engine.prefill[0].speed.speculation is None
    cell = run_cell(study, study.policy[1], study.workload[0], 1)
    assert cell.numbers["tokens_per_pass"] > 1
    assert "gap" not in cell.numbers


def first_cell(path: Path) -> Cell:
    study = load_study(path)
    return run_cell(study, study.policy[0], study.workload[0], 1)


@pytest.mark.parametrize(
    ("changed", "to", "told"),
    [
        ('name = "small"', 'name = "a/b"', "study.name"),
        ('name = "small"', 'name = "../small"', "study.name"),
        ("step_s = 5", "step_s = inf", "trainer.step_s"),
    ],
)
def test_what_no_study_can_be_is_refused_before_it_runs(
    tmp_path: Path, changed: str, to: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace(changed, to), encoding="utf-8")
    assert main(["simulate", str(tmp_path / "small.toml"), "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_before_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("steps = 2", "steps = 1000000"), encoding="utf-8")
    assert main(["simulate", str(tmp_path / "small.toml"), "--out", str(tmp_path / "small.toml")]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_ctrl_c_ends_a_study_and_its_processes(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("steps = 2", "steps = 1000000"), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "simulate", str(tmp_path / "small.toml"), "--processes", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as paceline:
        children: list[psutil.Process] = []
        while sum("spawn_main" in " ".join(child.cmdline()) for child in children) < 2:
            assert paceline.poll() is None
            time.sleep(0.05)
            children = psutil.Process(paceline.pid).children()
        os.killpg(paceline.pid, signal.SIGINT)  # as a terminal does
        _, said = paceline.communicate(timeout=240)
        assert paceline.returncode == 130
        assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=240)[1] == []


@pytest.mark.parametrize(
    "changed",
    [
        SMALL.replace("tailsieve", "swe-real").replace("seq_len = 40000", "seq_len = 8000"),
        SMALL + "\n[faults]\nenvironment = 1.0\n",
    ],
    ids=["every sample is cut before its answer", "the environment fails always"],
)
def test_a_study_of_which_nothing_can_train_ends_with_the_error_of_a_run(
    tmp_path: Path, changed: str
) -> None:
    (tmp_path / "small.toml").write_text(changed)
    with pytest.raises(NoProgressError, match=f"{DEAD_GROUPS + 1} groups in a row brought nothing to train"):
        first_cell(tmp_path / "small.toml")


def test_a_study_goes_on_where_nearly_every_request_fails(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL + "\n[faults]\ncall = 0.98\n")
    assert first_cell(tmp_path / "small.toml").numbers["steps"] == 2
