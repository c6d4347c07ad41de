"""`run.deterministic`: a run, run again, hands its trainer the same batches bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from e2e_kit import CommandLine, events

from paceline.cli.main import main
from paceline.domain import events as on
from paceline.transport.reader import read_batches

pytestmark = [pytest.mark.torch, pytest.mark.demo, pytest.mark.timeout(600)]

STEPS = 3
OPTIONS = {
    "run__max_steps": STEPS,
    "run__seed": 11,
    "run__deterministic": True,
    "scheduling__type": "synchronous",
    "env__0__id": "guess-number",
    "env__0__limits__max_turns": 4,
    "env__1__id": "reverse-text",
    "env__1__group_size": 3,
    "mix__by": "draws",
    "sampling__max_tokens": 16,
    "batch__seq_len": 256,
}


def done(root: Path, *words: str, **options: object) -> Path:
    root.mkdir(exist_ok=True)
    run = CommandLine(root, *words, **options)
    assert run.end(within_s=280) == 0, run.said
    assert (run.status.status, run.summary["steps"]) == ("done", STEPS)
    assert len(events(run.run_dir, on.BatchShipped)) == STEPS
    return run.run_dir


def test_the_same_run_again_makes_the_same_batches_and_killed_it_samples_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = done(tmp_path / "1", **OPTIONS)
    # What there is room for, who waits and who is preempted is otherwise in the second, and who shares a step too.
    second = done(tmp_path / "2", admission__cap=7, engine__replicas=2, engine__kv_tokens=1024, **OPTIONS)
    assert main(["replay", str(first), "--batches", "--against", str(second)]) == 0
    assert capsys.readouterr().out == f"{STEPS} batches are the same to the byte\n"
    assert main(["replay", str(first)]) == 0
    # In the third, the engine is killed in the middle of a step, and everything in the middle of another.
    (tmp_path / "3").mkdir()
    run = CommandLine(tmp_path / "3", **OPTIONS)
    run.when_opened()
    run.child("paceline.engines.embedded").send_signal(signal.SIGKILL)
    run.when_trained(2)
    run.process.kill()
    run.process.wait()
    killed = done(tmp_path / "3", "--resume", str(run.run_dir), **OPTIONS)
    assert tokens_of(killed) == tokens_of(first)


def tokens_of(run_dir: Path) -> list[object]:
    """All that trains, to the last bit, and all that is said of it but for the number of the attempt."""
    found: list[object] = []
    for batch in read_batches(run_dir, start_step=1):
        for part in batch.micro_batches:
            arrays = (
                part.token_ids,
                part.trainable,
                part.logprobs,
                part.advantages,
                part.versions,
                part.lengths,
            )
            found.append([array.tobytes() for array in arrays])
        found += [row._replace(rollout=row.rollout._replace(attempt=0)) for row in batch.samples]
    return found
