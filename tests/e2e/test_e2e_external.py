"""Runs with a trainer and engines that the run did not start: only the orchestrator is ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_kit import CommandLine, acknowledged, events, flags, numbers, records, trainer

import paceline
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.domain import events as on
from paceline.domain.commands import ShipBatch, StartRollout
from paceline.engines.embedded.process import EngineProcess
from paceline.errors import EngineError, PacelineError, TrainerError
from paceline.journal import read_rollouts
from paceline.transport.layout import rank_file
from paceline.transport.reader import read_batches
from paceline.transport.status import read_status

pytestmark = pytest.mark.torch


def run(root: Path, servers: list[EngineProcess], replicas: int = 1, **options: Any) -> dict[str, Any]:
    urls = [server.url for server in servers[:replicas]]
    elsewhere = {"engine__type": "vllm", "engine__urls": urls, "trainer__type": "external"}
    config = load(RunConfig, [], flags(run__dir=str(root), **{**elsewhere, **options})).value
    return paceline.run(config)


def test_any_trainer_on_any_server_and_what_it_reads_is_what_was_sampled(
    tmp_path: Path, servers: list[EngineProcess], model: Path
) -> None:
    run_dir = tmp_path / "t"
    with trainer(run_dir, model, ranks=2, how="ranks=2"):
        told = run(tmp_path, servers, replicas=2, batch__data_parallel=2)
    assert (told["status"], told["steps"], told["tokens_conserved"]) == ("done", 3, True)
    assert numbers(run_dir) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
    started = [c for r in records(run_dir) for c in r.commands if isinstance(c, StartRollout)]
    assert {start.engine for start in started} == {"vllm-0", "vllm-1"}
    stored = {rollout.id: rollout for rollout in read_rollouts(run_dir)}
    shipped = _samples(run_dir, steps=3, ranks=2)
    assert len(shipped) == 3 * 16
    for rollout_id, ids, logprobs, trainable in shipped:
        (turn,) = stored[rollout_id].turns
        assert ids.tolist() == [*turn.prompt_ids, *turn.sampled_ids]
        assert logprobs[trainable].tolist() == turn.logprobs.tolist()
        assert np.flatnonzero(trainable).tolist() == list(range(len(turn.prompt_ids), len(ids)))
    _assert_sampled_by(model, shipped[::6])
    # The same servers, now at v3 of the run before, begin the next one at v0.
    with trainer(tmp_path / "t-2", model):
        told = run(tmp_path, servers, replicas=2, run__max_steps=1)
    assert told["run_dir"] == str(tmp_path / "t-2")
    assert [event.version for event in events(tmp_path / "t-2", on.EngineJoined)] == [0, 0]


def _samples(run_dir: Path, steps: int, ranks: int) -> list[Any]:
    found = []
    for rank in range(ranks):
        for batch in read_batches(run_dir, rank=rank, start_step=1):
            for micro in batch.micro_batches:
                ends = np.cumsum(micro.lengths)
                for row, end, length in zip(micro.samples, ends, micro.lengths, strict=True):
                    part = slice(end - length, end)
                    found.append(
                        (row.rollout, micro.token_ids[part], micro.logprobs[part], micro.trainable[part])
                    )
            assert rank_file(run_dir, batch.step, rank).is_file()
            if batch.step == steps:
                break
    return found


def _assert_sampled_by(model: Path, samples: list[Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for _, ids, logprobs, trainable in samples:
        with torch.no_grad():
            scores = policy(torch.tensor(ids[None].astype(np.int64))).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(ids[1:, None].astype(np.int64))).squeeze(1).numpy()
        assert np.abs(expected - logprobs[1:])[trainable[1:]].max() < 1e-3


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("beyond", TrainerError, "published v6, but only"),
        ("mute", TrainerError, "batch 1 was shipped and the trainer has not acknowledged it for 4 s"),
        ("torn", TrainerError, "but published no weights since v0 for 4 s"),
        ("stale", TrainerError, "but published no weights since v1 for 4 s"),
        ("garbage", EngineError, "did not load 6 times, on no engine"),
    ],
)
def test_a_trainer_that_does_wrong_ends_the_run_with_the_cause(
    tmp_path: Path,
    servers: list[EngineProcess],
    model: Path,
    how: str,
    error: type[PacelineError],
    says: str,
) -> None:
    with trainer(tmp_path / "t", model, how=how), pytest.raises(error, match=says):
        run(tmp_path, servers, trainer__step_s=4.0)
    status = read_status(tmp_path / "t")
    assert status is not None
    assert (status.status, status.exit_code) == ("failed", 1)
    assert says in status.reason


def test_strictly_on_policy_nothing_is_ever_stale(
    tmp_path: Path, servers: list[EngineProcess], model: Path
) -> None:
    with trainer(tmp_path / "t", model):
        told = run(tmp_path, servers, scheduling__lag=0, scheduling__max_staleness=0)
    assert (told["status"], told["steps"], told["staleness_max"]) == ("done", 3, 0)
    shipped = [c.batch for r in records(tmp_path / "t") for c in r.commands if isinstance(c, ShipBatch)]
    assert {(b.step, version) for b in shipped for s in b.samples for version, _ in s.versions} == {
        (1, 0), (2, 1), (3, 2)
    }  # fmt: skip


def test_under_pressure_for_kv_a_run_only_gets_slower(tmp_path: Path, model: Path) -> None:
    """Two engines, each with room for little more than one sequence. So many steps that both are asked, also where the machine is
    busy and one of them tells its load late."""
    config = load(
        RunConfig,
        [],
        flags(
            run__dir=str(tmp_path),
            run__max_steps=12,
            engine__replicas=2,
            engine__kv_tokens=64,
            batch__seq_len=64,
            engine__max_num_seqs=2,
            sampling__max_tokens=24,
            metrics__load_interval_s=0.1,
            trainer__type="external",
        ),
    ).value
    with trainer(tmp_path / "t", model):
        told = paceline.run(config)
    assert (told["status"], told["steps"], told["tokens_conserved"]) == ("done", 12, True)
    loads = [event.load for event in events(tmp_path / "t", on.LoadReported) if event.load is not None]
    assert max(load.preemptions for load in loads) > 0
    assert max(load.running for load in loads) <= 2
    started = [c for r in records(tmp_path / "t") for c in r.commands if isinstance(c, StartRollout)]
    assert {start.engine for start in started} == {"embedded-0", "embedded-1"}


@pytest.mark.parametrize("dies", ["both", "the orchestrator"])
def test_s52_over_a_kill_every_task_of_an_epoch_is_trained_once(
    tmp_path: Path, servers: list[EngineProcess], model: Path, dies: str
) -> None:
    run_dir = tmp_path / "t"
    options = {
        "engine__type": "vllm",
        "engine__urls": [servers[0].url],
        "trainer__type": "external",
        "env__0__id": "e2e_envs:Words",
        "env__0__args": "{ tasks = 24 }",
        "env__0__epochs": 1,
        "run__max_steps": 50,
        "checkpoint__keep_last": 50,
    }

    def goes_on() -> CommandLine:
        second = CommandLine(tmp_path, "--resume", str(run_dir), **options)
        second.when_opened()
        return second

    first = CommandLine(tmp_path, **options)
    with trainer(run_dir, model) as (process,):
        first.when_trained(2)
        first.process.kill()
        first.process.wait()
        if dies == "both":
            process.kill()
            process.wait()
            process.returncode = 0
        else:  # the trainer stays, and trains on what it finds
            second = goes_on()
            assert second.end(within_s=60) == 0, second.said
    if dies == "both":
        second = goes_on()
        with trainer(run_dir, model):
            assert second.end(within_s=60) == 0, second.said
    assert sorted(acknowledged(run_dir)) == numbers(run_dir)[0]
    opened = events(run_dir, on.RunOpened)
    assert len(opened) == 2
    trained: dict[int, set[int]] = {}
    for step in numbers(run_dir)[0]:
        for row in next(read_batches(run_dir, start_step=step)).samples:
            trained.setdefault(row.task, set()).add(row.rollout.group)
    assert all(len(groups) == 1 for groups in trained.values()), "a task was trained twice"
    tasks = {
        c.rollout.group: c.task.index
        for r in records(run_dir)
        for c in r.commands
        if isinstance(c, StartRollout)
    }
    dead = {tasks[e.result.group] for e in events(run_dir, on.GroupProcessed) if e.result.dead is not None}
    assert set(trained) | dead == set(range(24))


def test_a_finite_source_that_runs_dry_ends_the_run_with_a_short_batch(
    tmp_path: Path, servers: list[EngineProcess], model: Path
) -> None:
    words = {"env__0__id": "e2e_envs:Words", "env__0__args": "{ tasks = 6 }", "env__0__epochs": 1}
    with trainer(tmp_path / "t", model):
        told = run(tmp_path, servers, run__max_steps=50, **words)
    assert (told["status"], told["reason"]) == ("done", "every source is exhausted")
    sizes = [
        len(c.batch.rollouts) for r in records(tmp_path / "t") for c in r.commands if isinstance(c, ShipBatch)
    ]
    assert sizes[:-1] == [16] * (len(sizes) - 1)
    assert 0 < sizes[-1] < 16
    assert sorted(acknowledged(tmp_path / "t")) == list(range(1, len(sizes) + 1))


@pytest.mark.parametrize(
    ("env", "says"), [("Constant", "zero_signal"), ("Raising", "ValueError: no sandbox for task")]
)
def test_s04_a_run_that_can_train_nothing_ends_with_the_counts(
    tmp_path: Path, servers: list[EngineProcess], env: str, says: str
) -> None:
    with pytest.raises(PacelineError, match="groups in a row brought nothing to train") as raised:
        run(tmp_path, servers, env__0__id=f"e2e_envs:{env}", batch__dead_group_limit=6)
    assert says in str(raised.value)
    status = read_status(tmp_path / "t")
    assert status is not None
    assert (status.status, status.exit_code) == ("failed", 1)
