"""Ctrl-C, SIGTERM, SIGKILL: how a run stops, what is left of it, and how it goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e_kit import CommandLine, acknowledged, events, gone, numbers, records

from paceline.cli.main import main
from paceline.domain import events as on
from paceline.domain.commands import FinishRun, ReportEval, ShipBatch
from paceline.transport.filesystem import digest_of
from paceline.transport.layout import rank_file

pytestmark = pytest.mark.torch

LONG = {"run__max_steps": 1000}
ON_POLICY = {"scheduling__lag": 0, "scheduling__max_staleness": 0}


def lives(run_dir: Path) -> list[list[int]]:
    """Steps that the trainer acknowledged, by life of the run. Checks what holds over all lives."""
    found: list[list[int]] = []
    cut = newest = 0
    last = 0.0
    for record in records(run_dir):
        assert record.at >= last, "the run's clock went back"
        last = record.at
        event = record.event
        if isinstance(event, on.RunOpened):
            if event.resumed_from is not None:
                assert event.resumed_from <= cut
                cut = event.resumed_from
            found.append([])
            newest = 0
        elif isinstance(event, on.StepTrained):
            found[-1].append(event.step)
        elif isinstance(event, on.PolicyPublished):
            assert newest < event.version <= cut
            newest = event.version
        for command in record.commands:
            if isinstance(command, ShipBatch):
                assert command.batch.step == cut + 1
                cut += 1
    for steps in found:
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    return found


def resume(root: Path, **options: object) -> CommandLine:
    return CommandLine(root, "--resume", str(root / "t"), **options)


def goes_on_to(root: Path, steps: int, **options: object) -> CommandLine:
    """Resume, and let it finish."""
    run = resume(root, run__max_steps=steps, **options)
    assert run.end(within_s=240) == 0, run.said
    assert (run.status.status, run.summary["steps"]) == ("done", steps)
    assert run.summary["tokens_conserved"]
    assert sorted(acknowledged(run.run_dir))[-1] == steps
    shipped, trained, published = numbers(run.run_dir)
    assert shipped[-1] == trained[-1] == published[-1] == steps
    return run


def test_ctrl_c_once_drains_and_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG, **ON_POLICY)
    run.when_trained(2)
    run.interrupt(signal.SIGINT)
    assert run.end(within_s=10) == 0, run.said
    assert (run.status.status, run.status.exit_code, run.status.reason) == ("stopped", 0, "Ctrl-C")
    assert (run.run_dir / "report.html").exists()
    assert len(lives(run.run_dir)) == 1
    (core,) = sorted((run.run_dir / "checkpoints" / "core").iterdir())[-1:]
    (saved,) = sorted((run.run_dir / "checkpoints" / "trainer").iterdir())[-1:]
    shipped, trained, _ = numbers(run.run_dir)
    assert core.name == f"step_{shipped[-1]:06d}.ckpt"
    assert saved.name == f"v{trained[-1]:08d}", (
        "the trainer had shipped batches left to train, and trained them"
    )
    assert trained[-1] == shipped[-1]
    again = goes_on_to(tmp_path, shipped[-1] + 1, **ON_POLICY)
    # What the trainer did after the stop is told at the start of the next life: once, and in order.
    assert [step for life in lives(again.run_dir) for step in life] == list(range(1, shipped[-1] + 2))
    # Engine and trainer hold the same weights, before and after.
    assert all(metrics["mismatch_kl"] < 1e-3 for metrics in acknowledged(run.run_dir).values())
    finishes = [c.status for r in records(run.run_dir) for c in r.commands if isinstance(c, FinishRun)]
    assert finishes == ["stopped", "done"]
    # A run that is done has nothing to go on with, and says so; with more steps to do, it goes on.
    idle = resume(tmp_path, run__max_steps=shipped[-1] + 1)
    assert idle.end(within_s=20) == 0
    assert "nothing to do" in idle.said
    assert "raise run.max_steps" in idle.said
    assert idle.summary["steps"] == shipped[-1] + 1
    goes_on_to(tmp_path, shipped[-1] + 2)


def test_ctrl_c_waits_for_no_report_that_takes_long(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:LongReport", **LONG)
    run.when(lambda: "opened" in run.said, within_s=240)
    run.interrupt(signal.SIGINT)
    assert run.end(within_s=240) == 0, run.said  # without a bound it never ends
    assert (run.status.status, run.status.reason) == ("stopped", "Ctrl-C")
    assert f"make it with: paceline report {run.run_dir}" in run.said


@pytest.mark.demo
def test_ctrl_c_of_the_whole_terminal_is_one_ctrl_c(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when_trained(1)
    run.interrupt(signal.SIGINT, whole_group=True)
    assert run.end(within_s=10) == 0
    assert run.status.status == "stopped"
    assert lives(run.run_dir)


def test_ctrl_c_twice_stops_at_once(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Stuck", **LONG)
    run.when(lambda: (run.run_dir / "logs" / "trainer.log").exists() and "joined" in run.said)
    time.sleep(0.3)
    run.interrupt(signal.SIGINT)
    time.sleep(0.2)
    asked = time.monotonic()
    run.interrupt(signal.SIGINT)
    assert run.end(within_s=10) == 130
    assert time.monotonic() - asked < 5
    assert (run.status.status, run.status.exit_code) == ("stopped", 130)


def test_code_that_holds_up_the_loop_cannot_keep_a_run_from_stopping(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Busy", run__drain_s=2, **LONG)
    run.when(lambda: "held up" in run.said)
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=10) == 130
    assert (run.status.status, run.status.exit_code) == ("stopped", 130)
    assert "was cut off" in run.status.reason


@pytest.mark.demo
def test_work_that_hangs_cannot_keep_a_run_from_stopping(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Stuck", **LONG)
    run.when_opened()
    time.sleep(0.3)
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=10) in (0, 130)
    assert run.status.status == "stopped"


def test_a_run_that_fails_tells_the_cause_although_its_work_does_not_stop(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Failing", batch__dead_group_limit=1, **LONG)
    assert run.end(within_s=60) == 1
    assert (run.status.status, run.status.exit_code) == ("failed", 1)
    assert "no sandbox" in run.status.reason
    assert "no sandbox" in run.said


def test_sigterm_while_it_starts_ends_it(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when(lambda: len(run.children()) >= 2)
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=10) == 0
    assert (run.status.status, run.status.exit_code) == ("stopped", 0)


@pytest.mark.demo
def test_sigterm_is_like_ctrl_c(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when_trained(1)
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=10) == 0
    assert (run.status.status, run.status.reason) == ("stopped", "SIGTERM")
    goes_on_to(tmp_path, numbers(run.run_dir)[0][-1] + 1)


@pytest.mark.timeout(600)
def test_sigterm_to_every_process_of_a_job_is_like_ctrl_c(tmp_path: Path) -> None:
    may_stop = tmp_path / "may_stop"
    options = {
        "env__0__id": "e2e_envs:Lingering",
        "env__0__args__until": str(may_stop),
        "env__1__id": "e2e_envs:Words",
        "env__1__workers": '{ type = "process" }',
        "run__drain_s": 240,
    }
    run = CommandLine(tmp_path, **LONG, **options)
    run.when(lambda: may_stop.with_suffix(".waits").exists() and bool(acknowledged(run.run_dir)), 240)
    trainer = run.child("paceline.trainer")
    for child in run.children():
        child.terminate()
    run.interrupt(signal.SIGTERM)
    gone([trainer], within_s=120)  # it has saved, and ended, before the work of the run has stopped
    may_stop.touch()
    assert run.end(within_s=240) == 0, run.said
    assert (run.status.status, run.status.reason) == ("stopped", "SIGTERM")
    (saved,) = sorted((run.run_dir / "checkpoints" / "trainer").iterdir())[-1:]
    assert saved.name == f"v{numbers(run.run_dir)[1][-1]:08d}"
    assert run.summary["tokens_conserved"]


def test_a_signal_that_is_sent_twice_at_once_counts_once(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when_trained(1)
    run.interrupt(signal.SIGTERM)
    time.sleep(0.02)
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=15) == 0, run.said
    assert (run.status.status, run.status.reason) == ("stopped", "SIGTERM")


def test_s79_nothing_is_left_of_a_killed_run_and_it_goes_on_at_once(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when_trained(3)
    children = run.children()
    assert len(children) >= 4
    run.process.kill()
    run.process.wait()
    at_once = resume(tmp_path, run__max_steps=8)
    gone(children, within_s=5)
    assert at_once.end(within_s=60) == 0, at_once.said
    assert at_once.status.status == "done"
    first, second = lives(run.run_dir)
    assert first[0] == 1
    assert second[0] <= first[-1] + 1
    assert second[-1] == 8


@pytest.mark.demo
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    chance = random.Random(0)
    run = CommandLine(tmp_path, checkpoint__every=2, **LONG)
    for _ in range(3):
        run.when_opened()
        time.sleep(chance.uniform(0, 2.5))
        run.process.kill()
        run.process.wait()
        run = resume(tmp_path, checkpoint__every=2, **LONG)
    run.when_opened()
    run.interrupt(signal.SIGINT)
    assert run.end(within_s=10) == 0
    goes_on_to(tmp_path, numbers(run.run_dir)[0][-1] + 2, checkpoint__every=2)
    assert len(lives(run.run_dir)) >= 2


def test_s60_when_the_trainer_dies_the_run_ends_with_the_cause_and_goes_on_later(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when_trained(2)
    children = run.children()
    os.kill(run.child("paceline.trainer").pid, signal.SIGKILL)
    killed = time.monotonic()
    assert run.end(within_s=10) == 1, run.said
    assert time.monotonic() - killed < 6
    gone(children, within_s=1)
    assert (run.status.status, run.status.exit_code) == ("failed", 1)
    assert "trainer ended by itself (signal SIGKILL); the last lines of" in run.status.reason
    assert "error: trainer ended by itself" in run.said
    step = max(numbers(run.run_dir)[0])
    goes_on_to(tmp_path, step + 2)
    assert len(lives(run.run_dir)) == 2


@pytest.mark.demo
def test_when_the_engine_dies_it_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, run__max_steps=40)
    run.when_trained(3)
    os.kill(run.child("paceline.engines.embedded").pid, signal.SIGKILL)
    assert run.end(within_s=90) == 0, run.said
    assert (run.status.status, run.summary["steps"], run.summary["tokens_conserved"]) == ("done", 40, True)
    assert lives(run.run_dir) == [list(range(1, 41))]
    kinds = [type(record.event) for record in records(run.run_dir)]
    # Its process is seen to be gone, or its calls to fail: whichever comes first.
    assert kinds.count(on.EngineLost) <= 1
    assert kinds.count(on.EngineJoined) == 2


@pytest.mark.demo
def test_what_was_learnt_is_kept_over_a_kill(tmp_path: Path) -> None:
    options = {
        "batch__rollouts": 64,
        "env__0__group_size": 8,
        "admission__cap": 64,
        "checkpoint__every": 5,
        "eval__0__id": "reverse-text",
        "eval__0__examples": 64,
        "eval__0__every": 5,
        "sampling__max_tokens": 24,
    }
    run = CommandLine(tmp_path, run__max_steps=40, **options)
    run.when_trained(20)
    run.process.kill()
    run.process.wait()
    again = goes_on_to(tmp_path, 40, **options)
    evals: dict[int, list[float]] = {}
    for record in records(run.run_dir):
        for command in record.commands:
            if isinstance(command, ReportEval) and command.mean_reward is not None:
                evals.setdefault(command.version, []).append(command.mean_reward)
    assert again.summary["heldout"]["reverse-text"]["start_version"] == 0
    resumed_from = [r.event.resumed_from for r in records(run.run_dir) if isinstance(r.event, on.RunOpened)][
        1
    ]
    assert resumed_from is not None
    before = max(v for v in evals if v <= resumed_from)
    after = min(v for v in evals if v > before)
    assert evals[after][0] > evals[before][0] - 0.1
    assert evals[40][-1] > evals[0][0] + 0.2


@pytest.mark.demo
def test_one_run_directory_is_run_by_one_process(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **LONG)
    run.when(lambda: run.run_dir.exists() and psutil.Process(run.process.pid).children() != [])
    other = resume(tmp_path, **LONG)
    assert other.process.wait(30) == 2
    assert "is being run by another process" in other.said
    run.interrupt(signal.SIGTERM)
    assert run.end(within_s=10) == 0


def test_each_life_is_decided_again_with_its_own_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = CommandLine(tmp_path, run__max_steps=2, env__0__id="e2e_envs:Words", **ON_POLICY)
    assert first.end(within_s=120) == 0, first.said
    changed = {"admission__cap": 12, "env__0__group_size": 8, "batch__rollouts": 24}
    again = resume(tmp_path, run__max_steps=4, env__0__id="e2e_envs:Words", **ON_POLICY, **changed)
    assert again.end(within_s=120) == 0, again.said
    assert [r.event.config for r in records(again.run_dir) if isinstance(r.event, on.RunOpened)] == [1, 2]
    assert main(["replay", str(again.run_dir)]) == 0
    assert "of 2 lives, no divergence" in capsys.readouterr().out
    # What was shipped is what the recorded rollouts give, bit for bit.
    assert main(["replay", str(again.run_dir), "--batches"]) == 0
    assert capsys.readouterr().out == "4 batches are the same to the byte\n"
    for shipped in events(again.run_dir, on.BatchShipped):
        assert shipped.digests == (digest_of(rank_file(again.run_dir, shipped.step, 0)),)
    kept = again.run_dir / "configs" / "000001.toml"
    kept.write_bytes((again.run_dir / "config.toml").read_bytes())
    assert main(["replay", str(again.run_dir)]) == 1, "the first life had another config"
    kept.unlink()
    assert main(["replay", str(again.run_dir)]) == 0
    told = capsys.readouterr().out
    assert "were not decided again: its config" in told
    assert main(["replay", str(again.run_dir), "--batches"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"batches 1 to 2 were not made again: {kept}, which says how it was packed, is gone",
        "2 of 4 batches are the same to the byte; 2 could not be made again",
    ]
    assert "of 1 life, no divergence" in told
