"""The policies that cut, hold, race or reorder rollouts, each a short run on a real vLLM: what they train is what vLLM sampled, however
many requests it took, and what they claim of staleness holds there."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_kit import ROOT, Server, run_to_end
from vllm_wiretap import Call, Wiretap, sequences

from paceline.core.staleness import staleness
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.journal import read_journal
from paceline.observe.run import RunFolds
from paceline.transport.layout import BATCHES, steps_in

pytestmark = pytest.mark.timeout(600)

EXAMPLE = ROOT / "examples" / "reverse-text" / "vllm.toml"
STEPS = 5
SMALLER = {"batch.rollouts": 64, "env.0.group_size": 4, "eval.0.examples": 16, "eval.0.every": STEPS}


class Run:
    """A run that has ended well, as its journal, its trainer and whoever listens between it and vLLM tell it."""

    def __init__(self, root: Path, calls: list[Call], said: str) -> None:
        self.dir = root / "t"
        report = json.loads(said.splitlines()[-1])
        assert report["tokens_conserved"] is True
        assert report["steps"] == STEPS
        self.commands: list[Command] = []
        self.ended: dict[RolloutId, Rollout] = {}
        self.folds = RunFolds()
        for record in read_journal(self.dir):
            self.folds.apply(record.at, record.event, record.commands)
            self.commands += record.commands
            if isinstance(record.event, on.RolloutEnded):
                self.ended[record.event.rollout.id] = record.event.rollout
        self._received: defaultdict[tuple[int, ...], list[Call]] = defaultdict(list)
        for call in calls:
            self._received[tuple(call[0])].append(call)
        self.requests = self._traced()

    def _traced(self) -> list[int]:
        """Of each trained sequence, how many requests its tokens came from; each token with the logprob that it came with."""
        requests = []
        for step in steps_in(self.dir / BATCHES):
            for ids, trainable, logprobs in sequences(self.dir, step):
                at, count = int(np.argmax(trainable)), 0
                assert trainable[at:].all()  # one turn: all behind the prompt was sampled
                while at < len(ids):
                    at += self._taken(ids, logprobs, at)
                    count += 1
                requests.append(count)
        assert (
            len(requests) == STEPS * SMALLER["batch.rollouts"] or self.of(do.PutOff) or self.of(do.SplitGroup)
        )
        return requests

    def _taken(self, ids: Any, logprobs: Any, at: int) -> int:
        """Tokens of the request that went on behind the first `at`. No request is trained twice."""
        alike = self._received[tuple(ids[:at].tolist())]
        for call in alike:
            _, got, said, _ = call
            end = at + len(got)
            if (
                got
                and ids[at:end].tolist() == got
                and np.array_equal(logprobs[at:end], np.array(said, np.float32))
            ):
                alike.remove(call)
                return len(got)
        raise AssertionError(f"no request has sampled what follows the first {at} tokens of {ids.tolist()}")

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def late(self) -> set[int]:
        batches = [command.batch for command in self.of(do.ShipBatch)]
        return {staleness(sample.oldest_version, batch.step) for batch in batches for sample in batch.samples}

    @property
    def of_several_versions(self) -> list[Any]:
        batches = [command.batch for command in self.of(do.ShipBatch)]
        return [sample for batch in batches for sample in batch.samples if len(sample.versions) > 1]

    def places(self, name: str) -> int:
        return sum(line.rollouts[name] for line in self.folds.account.lines() if line.split == "train")  # type: ignore[index]


async def run_of(server: Server, root: Path, **options: Any) -> Run:
    async with Wiretap(server).running() as tap:
        given = SMALLER | {name.replace("__", "."): value for name, value in options.items()}
        words = [f"--engine.urls=[{json.dumps(tap.url)}]", f"--run.dir={root}", "--run.name=t"]
        words += [f"--run.max_steps={STEPS}", "--plain", "--summary=json"]
        said = await run_to_end(EXAMPLE, *words, *(f"--{name}={value}" for name, value in given.items()))
    return Run(root, tap.calls, said)


async def test_unbiased_tail_goes_on_with_the_tokens_that_a_response_had(
    server: Server, tmp_path: Path
) -> None:
    """What `late` is on a vLLM, whose noise cannot be pinned."""
    run = await run_of(
        server,
        tmp_path,
        scheduling__type="unbiased_tail",
        scheduling__cutoff_tokens=8,
        algorithm__name="rloo",
    )
    assert run.places("deferred") == 0
    assert run.of(do.SplitGroup)
    assert run.of_several_versions
    assert max(run.requests) > 1


@pytest.mark.parametrize("policy", ["divided", "kv_area"])
async def test_chunks_of_one_answer_train_as_one(server: Server, tmp_path: Path, policy: str) -> None:
    run = await run_of(
        server, tmp_path, scheduling__type=policy, scheduling__chunk_tokens=4, admission__cap=24
    )
    assert max(grant.max_tokens or 0 for grant in run.of(do.GrantTurn)) <= 4
    assert max(run.requests) > 2
    assert max(run.late) <= 4
    assert (policy != "kv_area") or run.of(do.NoteLengths)


async def test_partial_rollouts_go_on_in_the_next_round(server: Server, tmp_path: Path) -> None:
    run = await run_of(
        server, tmp_path, scheduling__type="partial", scheduling__budget_tokens=4, scheduling__max_staleness=8
    )
    assert run.of(do.ParkRollout)
    assert run.of_several_versions
    assert max(run.requests) > 1
    assert max(run.late) <= 8


@pytest.mark.parametrize("late", ["keep", "discard"])
async def test_what_loses_a_race_trains_later_or_is_counted(
    server: Server, tmp_path: Path, late: str
) -> None:
    run = await run_of(
        server, tmp_path, scheduling__type="overprovision", scheduling__factor=1.5, scheduling__late=late
    )
    assert (run.places("discarded") > 0) == (late == "discard")
    assert max(run.late) <= 4
    assert (late != "discard") or run.late == {0}


async def test_tail_rounds_run_what_lost_in_a_round_of_its_own(server: Server, tmp_path: Path) -> None:
    run = await run_of(server, tmp_path, scheduling__type="tail_rounds")
    puts = {put.number for put in run.of(do.PutOff)}
    back = {start.put_off for start in run.of(do.StartRollout) if start.put_off}
    assert back
    assert back <= puts
    assert run.late == {0}
