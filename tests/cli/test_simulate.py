"""`paceline simulate`: what a study's results are shown and written as, and what it is refused for."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
from rich.console import Console

import paceline.cli.studies
from paceline.cli.main import main
from paceline.cli.simulate import _tables
from paceline.cli.studies import simulate, write_study
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.sim.cells import Cell
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


REFUSED = (
    (SMALL + 'scheduling = { type = "unbiased_tail" }\n', "use algorithm.name"),
    (SMALL.replace("group_size = 4", "group_size = 64"), "group_size 64 > batch.rollouts 16"),
    (SMALL.replace("[[policy]]", '[[workload.env]]\npreset = "tailsieve"\n\n[[policy]]'), "are both called 'tailsieve'"),
    (SMALL + 'algorithm = { name = "grppo" }\n', "'grppo'"),
    (SMALL + "\n[engines]\nmax_model_len = 1000\n", "raise engines.max_model_len"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_a_run_would_refuse_of_any_policy_is_refused_before_a_study_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    # Another policy comes first, which could run for hours.
    text = text.replace("[[policy]]", '[[policy]]\nname = "first"\n\n[[policy]]').replace(
        "steps = 1", "steps = 1000000"
    )
    assert main(["simulate", str(written(tmp_path, text)), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "with workload 'answers'" in told


def test_all_that_a_run_would_refuse_is_told_at_once(tmp_path: Path) -> None:
    text = SMALL.replace("group_size = 4", "group_size = 64") + 'algorithm = { name = "grppo" }\n'
    with pytest.raises(ConfigError, match=r"2 things are wrong in the study:\n.*group_size 64.*\n.*'grppo'"):
        load_study(written(tmp_path, text))


def test_the_config_of_a_cell_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    study = load_study(written(tmp_path))
    one = study.workload[0].env[0].model_copy(update={"group_size": 64})
    workload = study.workload[0].model_copy(update={"env": (one,)})
    with pytest.raises(
        ConfigError, match="policy 'overlap' with workload 'answers': env 'tailsieve' has group_size 64"
    ):
        study.run_config(workload, study.policy[0], 1)
    with pytest.raises(ConfigError, match="group_size 64"):
        simulate(study.model_copy(update={"workload": (workload,)}), processes=1)


@pytest.mark.parametrize(
    "options", [("--seeds", "0"), ("--seeds", "-3"), ("--processes", "0"), ("--processes", "-1")]
)
def test_numbers_of_seeds_and_processes_are_positive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    assert main(["simulate", str(written(tmp_path)), f"{options[0]}={options[1]}"]) == 2
    assert "is no whole number of at least 1" in capsys.readouterr().err
    if options[0] == "--processes":
        with pytest.raises(ConfigError, match="it takes at least 1"):
            simulate(written(tmp_path), processes=int(options[1]))


def test_engines_of_a_run_are_refused_where_a_study_has_prefill_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SMALL + "prefill = {}\n")
    assert main(["simulate", str(path), "--engines-from", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "policy 'overlap': prefill needs to know the model" in capsys.readouterr().err


def with_processes(path: Path, *options: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A study that goes on for ever, and its two processes."""
    command = [sys.executable, "-m", "paceline", "simulate", str(path), "--processes", "2", *options]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    while sum("spawn_main" in " ".join(child.cmdline()) for child in children) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
        children = psutil.Process(parent.pid).children()
    return parent, [child for child in children if "spawn_main" in " ".join(child.cmdline())]


ENDLESS = SMALL.replace("steps = 1", "steps = 1000000").replace("seeds = 1", "seeds = 2")


def test_a_process_of_a_study_that_is_killed_ends_it_with_the_reason(tmp_path: Path) -> None:
    parent, children = with_processes(written(tmp_path, ENDLESS), "--out", str(tmp_path))
    with parent:
        os.kill(children[0].pid, signal.SIGKILL)
        _, said = parent.communicate(timeout=240)
    assert parent.returncode == 1
    assert "error: a process of the study was killed" in said
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=240)[1] == []


def test_processes_of_a_study_end_with_one_that_is_told_to(tmp_path: Path) -> None:
    parent, children = with_processes(written(tmp_path, ENDLESS), "--out", str(tmp_path))
    with parent:
        parent.terminate()
        parent.communicate(timeout=240)
    assert psutil.wait_procs(children, timeout=240)[1] == []


CUT = SMALL.replace("seeds = 1", "seeds = 2").replace("seq_len = 40000", "seq_len = 8000").replace(
    "[[policy]]", """[[workload]]
name = "all cut"
[[workload.env]]
preset = "swe-real"
group_size = 4

[[policy]]""",
)  # fmt: skip
"""Of its second workload every sample is cut before its answer, so that nothing trains: a cell ends after a thousand groups."""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_cells_that_are_done_are_kept_when_a_later_one_ends_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: str
) -> None:
    whole = tmp_path / "small.csv"
    whole.write_text("of an earlier study", "utf-8")
    assert (
        main(["simulate", str(written(tmp_path, CUT)), "--processes", processes, "--out", str(tmp_path)]) == 1
    )
    told = capsys.readouterr()
    assert "error: policy 'overlap', workload 'all cut', seed 1: " in told.err
    assert "2 cells" in told.out
    rows = (tmp_path / "small-part.csv").read_text("utf-8").splitlines()
    assert [row.split(",")[:3] for row in rows[1:]] == [
        ["overlap", "answers", "1"],
        ["overlap", "answers", "2"],
    ]
    assert whole.read_text("utf-8") == "of an earlier study"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cells_that_are_done_are_kept_when_a_signal_ends_the_study(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    text = SMALL.replace("seeds = 1", "seeds = 1000000")
    path = written(tmp_path, text)
    options = ("--processes", "2", "--out", str(tmp_path))
    command = [sys.executable, "-m", "paceline", "simulate", str(path), *options]
    shown = os.environ | {"FORCE_COLOR": "1"}  # the bar, as a terminal has it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=shown) as study:
        assert study.stdout is not None
        said = b""
        while not re.search(rb"[1-9]\d*/1000000", said):
            said += os.read(study.stdout.fileno(), 1 << 16)
            assert study.poll() is None
        study.send_signal(number)
        rest, _ = study.communicate(timeout=240)
    assert study.returncode == code
    assert b"small-part.csv" in rest
    assert b"did not come to its end" in rest
    rows = (tmp_path / "small-part.csv").read_text("utf-8").splitlines()
    seeds = [int(row.split(",")[2]) for row in rows[1:]]
    assert seeds  # with a gap where one was under way
    assert seeds == sorted(set(seeds))


def test_a_cell_that_is_done_is_kept_when_the_pool_breaks_before_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ProcessPoolExecutor] = []

    @contextmanager
    def processes_of(count: int) -> Iterator[ProcessPoolExecutor]:
        with ProcessPoolExecutor(count, mp_context=paceline.cli.studies.get_context("spawn")) as pool:
            pools.append(pool)
            yield pool

    monkeypatch.setattr(paceline.cli.studies, "processes_of", processes_of)
    monkeypatch.setattr(paceline.cli.studies, "_AHEAD", 1)
    told: list[int] = []

    def finished(cell: Cell) -> None:
        told.append(cell.seed)
        if len(told) == 1:
            while pools[0]._pending_work_items:  # what is handed out is done
                time.sleep(0.01)
            for process in list(pools[0]._processes.values()):
                process.kill()
            while not pools[0]._broken:
                time.sleep(0.01)

    with pytest.raises(PacelineError, match="was killed"):
        simulate(written(tmp_path, SMALL.replace("seeds = 1", "seeds = 9")), processes=2, finished=finished)
    assert told == [1, 2]


def test_the_end_of_one_study_leaves_the_processes_of_another_alone(tmp_path: Path) -> None:
    ended: list[object] = []

    def other() -> None:
        try:
            simulate(written(tmp_path, SMALL.replace("seeds = 1", "seeds = 30")), processes=2, finished=begun)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    first = Event()

    def begun(cell: Cell) -> None:
        first.set()

    thread = Thread(target=other)
    thread.start()
    assert first.wait(60)
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(PacelineError, match="policy 'overlap', workload 'all cut', seed 1"):
        simulate(written(bad, CUT), processes=2)
    thread.join(120)
    assert ended == [None]


def test_whatever_error_of_the_core_ends_a_cell_names_it(tmp_path: Path) -> None:
    text = SMALL + "\n[faults]\nengine_lost_at_s = [1.0]\n"
    with pytest.raises(EngineError, match="policy 'overlap', workload 'answers', seed 1: no engine"):
        simulate(written(tmp_path, text), processes=1)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    path = written(tmp_path, ENDLESS)
    script = tmp_path / "script.py"
    script.write_text(f"import paceline\npaceline.simulate({str(path)!r}, processes=2)\n", "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1
    assert 'below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_few_of_very_many_cells_are_handed_out_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[Future[Any]] = []

    class Pool(ProcessPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Future[Any]:
            future = super().submit(*args, **options)
            pending[:] = [each for each in (*pending, future) if not each.done()]
            assert len(pending) <= 64
            return future

    @contextmanager
    def processes_of(count: int) -> Iterator[Pool]:
        with Pool(count, mp_context=paceline.cli.studies.get_context("spawn")) as pool:
            yield pool

    class Enough(Exception):
        pass

    def seen(done: int, total: int) -> None:
        assert total == 1_000_000_000
        if done == 40:
            raise Enough

    monkeypatch.setattr(paceline.cli.studies, "processes_of", processes_of)
    path = written(tmp_path, SMALL.replace("seeds = 1", "seeds = 1000000000"))
    with pytest.raises(Enough):
        simulate(path, processes=2, progress=seen)


def test_cells_come_in_their_order_from_however_many_processes(tmp_path: Path) -> None:
    text = SMALL.replace("seeds = 1", "seeds = 40") + '\n[[policy]]\nname = "another"\n'
    cells = simulate(written(tmp_path, text), processes=2)
    assert [(cell.policy, cell.seed) for cell in cells] == [
        (policy, seed) for policy in ("overlap", "another") for seed in range(1, 41)
    ]


@pytest.mark.parametrize("option", ["--from", "--engines-from"])
def test_a_directory_without_a_run_is_the_users_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "empty").mkdir()
    command = ["simulate", str(written(tmp_path)), "--out", str(tmp_path), option, str(tmp_path / "empty")]
    assert main(command) == 2
    assert "empty holds no journal: give the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["slow = 1.5", "expert_parallel = true", "shared_kv_gb_s = 40"])
def test_what_recorded_engines_would_ignore_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    path = written(tmp_path, f"{SMALL}\n[engines]\n{key}\n")
    assert main(["simulate", str(path), "--engines-from", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"leave {key.split()[0]} out of [engines]" in capsys.readouterr().err


LENGTHS = "reasoning = {{ median = 1000, cap = 8000, {} }}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SMALL.replace("steps = 1", "seconds = 60\nskip_seconds = 60"), "skip_seconds 60 leave nothing to count of seconds 60"),
        (SMALL.replace("steps = 1", "poll_s = 1e-9"), "study.poll_s"),
        (SMALL.replace("steps = 1", "sample_s = 1e-9"), "study.sample_s"),
        (SMALL.replace('preset = "tailsieve"', LENGTHS.format("sigma = 1e9")), "sigma = 1"),
        (SMALL.replace('preset = "tailsieve"', LENGTHS.format("sigma = 30, icc = 0.5")), "sigma = 30"),
        (SMALL.replace('preset = "tailsieve"', LENGTHS.format("sigma = 1, drift = 1e300")), "drift = 1"),
        (SMALL.replace('preset = "tailsieve"', LENGTHS.format("sigma = 1, prompt_sigma = 1e300")), "prompt_sigma = 1"),
        (SMALL.replace('preset = "tailsieve"', "agents = { turns = 4, observed_sigma = 1e9 }"), "observed_sigma = 1"),
        (SMALL + "\n[efficiency]\nkv = 0.0\n", "efficiency.kv is 0, and is a share of what the data sheet says: from 0.001 to 1"),
        (SMALL + "\n[efficiency]\ncompute = 0.0\n", "efficiency.compute is 0"),
        (SMALL + "\n[efficiency]\nweights = -0.5\n", "efficiency.weights is -0.5"),
        (SMALL + "\n[efficiency]\nseq_s = -1e-3\n", "efficiency.seq_s is -0.001: it takes 0 or more"),
        (SMALL + "\n[efficiency]\nnetwork_gb_s = 0\n", "efficiency.network_gb_s is 0: it takes more than 0"),
    ],
)  # fmt: skip
def test_numbers_that_no_simulation_can_take_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert main(["simulate", str(written(tmp_path, text)), "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape",
    [
        "reasoning = { median = 1e308, cap = 8000, sigma = 10, prompt_sigma = 10, drift = 1, icc = 0.5 }",
        "agents = { turns = 1e308, turns_sigma = 10, turns_at_end = 1e-308, observed = 1e308 }",
    ],
)
def test_the_widest_lengths_that_are_taken_can_be_drawn(tmp_path: Path, shape: str) -> None:
    text = SMALL.replace('preset = "tailsieve"', shape).replace("steps = 1", "seconds = 60")
    (cell,) = simulate(written(tmp_path, text), processes=1)
    assert cell.numbers["sampled_per_s"] > 0


def test_a_table_is_cut_where_it_is_wider_than_the_terminal() -> None:
    cells = [
        Cell(f"policy number {n}", "w", seed, {"goodput": 100.0 * (n + 1), "step_s": 4.0})
        for n in range(5)
        for seed in (1, 2)
    ]
    for width, count in ((80, 3), (200, 1), (20, 5)):
        shown = list(_tables(cells, "w", width))
        assert len(shown) == count
        titles = [str(column.header) for each in shown for column in each.columns[1:]]
        assert titles == [f"policy number {n}" for n in range(5)]
        if width >= 80:
            said = io.StringIO()
            console = Console(file=said, width=width)
            for each in shown:
                console.print(each)
            assert "…" not in said.getvalue()
            assert said.getvalue().count("trained tokens/s, times as many") == count
            assert "5.00 ±0.00" in said.getvalue(), "by the first policy, in whichever table"
