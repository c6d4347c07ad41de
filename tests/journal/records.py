"""Rollouts and records for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.domain import commands as c
from paceline.domain import events as e
from paceline.domain.batch import Batch
from paceline.domain.group import ClosedGroup, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import COMPLETED, Message, Outcome, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef


def turn(rng: np.random.Generator, prompt: int, sampled: int, *, extends: bool = True) -> Turn:
    return Turn(
        prompt_ids=rng.integers(0, 150_000, prompt).astype(np.int32),
        sampled_ids=rng.integers(0, 150_000, sampled).astype(np.int32),
        logprobs=-rng.exponential(1.0, sampled).astype(np.float32),
        versions=((3, sampled - sampled // 2), (4, sampled // 2)),
        extends=extends,
        finish="stop",
        engine="e0",
        cached_tokens=prompt // 2,
        queued_s=0.25,
        started=float(rng.random()),
        ended=2.0,
        segments=2,
    )


def rollout(number: int, sizes: tuple[tuple[int, int], ...] = ((5, 7),), **more: Any) -> Rollout:
    rng = np.random.default_rng(number)
    fields: dict[str, Any] = {
        "id": RolloutId(number // 4, number % 4),
        "task": TaskRef("arithmetic", "train", number),
        "outcome": COMPLETED if number % 3 else Outcome("truncated", "turns", "after 4 turns"),
        "turns": tuple(turn(rng, p, s, extends=i > 0) for i, (p, s) in enumerate(sizes)),
        "reward": number / 4,
        "rewards": {"right": 1.0},
        "metrics": {"steps": 3.0},
        "temperature": 0.9,
        "started": 1.0,
        "ended": 9.0,
        "model_s": 4.0,
        "gate_s": 0.5,
        "messages": (Message("user", "2+2?"), Message("assistant", "4 ✓")),
        "info": {"sandbox": "s-1", "tries": [1, 2]},
        **more,
    }
    return Rollout(**fields)


def sample(of: Rollout, *, per_token: bool = False) -> Sample:
    first = of.turns[0]
    tokens = len(first.prompt_ids) + len(first.sampled_ids)
    trainable = np.arange(tokens) >= len(first.prompt_ids)
    return Sample(
        token_ids=np.concatenate([first.prompt_ids, first.sampled_ids]),
        trainable=trainable,
        logprobs=np.concatenate([np.zeros(len(first.prompt_ids), np.float32), first.logprobs]),
        versions=first.versions,
        rollout=of.id,
        env=of.task.env,
        task_index=of.task.index,
        ending=of.outcome.ending,
        reward=0.5,
        temperature=of.temperature,
        advantage=np.ones(tokens, np.float32) if per_token else 0.25,
        streams={"loss_weights": np.ones(tokens, np.float32)} if per_token else {},
    )


def one_of_each() -> list[tuple[e.Event, tuple[c.Command, ...]]]:
    """A short run in which every event and every command occurs."""
    members = tuple(rollout(n) for n in range(4))
    task = TaskRef("arithmetic", "train", 0)
    samples = tuple(sample(r, per_token=n == 1) for n, r in enumerate(members))
    verdicts = tuple(
        Verdict(r.id, "queued", "", (s,), 0.25, ("long",), 1) for r, s in zip(members, samples, strict=True)
    )
    start = c.StartRollout(members[0].id, task, 7, 8, "e0", 0, "a place was free")
    group = ClosedGroup(0, task, 4, members)
    ids = tuple(r.id for r in members)
    return [
        (e.RunOpened("run-1", 1), ()),
        (e.EngineJoined(EngineInfo("e0", 1000, None), 0), (start, c.WakeAt(4.5, "rate limit"))),
        (
            e.LoadReported("e0", EngineLoad(1, 2, 0.95, 0)),
            (
                c.NoteCap("e0", 12, "preemptions"),
                c.NoteDead("a", 32, "32 groups in a row"),
                c.NoteOutage("a", True, "env 'a' is out"),
                c.NoteQuarantine("a", 3, "task 3 of env 'a' is not drawn any more"),
                c.NoteOpened(4, TaskRef("a", "train", 5), 3, 11, 2),
                c.NoteRedraw(TaskRef("a", "train", 5), 2),
                c.SkipTask(TaskRef("a", "train", 3)),
                c.ParkRollout(ids[0], "over the cap"),
            ),
        ),
        (e.LoadReported("e0", None), (c.ResumeRollout(ids[0], "11 of 12 run"),)),
        (e.TurnRequested(ids[0], 5, 7), (c.GrantTurn(ids[0], "e0", 0),)),
        (e.SegmentEnded(ids[0], "e0", ((0, 7),), "stop", 2, 0.5), ()),
        (
            e.RolloutContinued(ids[1], 7, 2, 1, True, 0, "its prompt differs"),
            (c.ContinueRollout(ids[1], task, 7, 8, "e0", 0, 1.5, 9, 2, "it was under way", 2.5),),
        ),
        (e.RolloutEnded(members[0]), (c.NoteRetry(ids[0], "engine: at most 3 attempts"),)),
        *((e.RolloutEnded(r), ()) for r in members[1:3]),
        (
            e.RolloutEnded(members[3]),
            (c.ProcessGroup(group, "closed"), c.CancelRollout(ids[1], "stale", "v9")),
        ),
        (
            e.GroupProcessed(GroupResult(0, verdicts, 0.5, 0.1), 0.01),
            (c.ShipBatch(Batch(1, samples, ids), "full"), c.ForgetGroup(0)),
        ),
        (e.BatchShipped(1, 999, 0.1, 0.2), ()),
        (e.StepTrained(1, {"loss": 0.5}), (c.SaveCheckpoint(1, {"queue": [1]}, "every step"),)),
        (e.CheckpointSaved(1, 0.1), ()),
        (e.PolicyPublished(1, "weights/v000001"), (c.UpdateWeights("e0", 1, "weights/v000001", "new"),)),
        (e.WeightsLoaded("e0", 1, 0.2), (c.ReportEval("arithmetic", 1, 1, 4, 4, 0.5, {1: 0.5, 2: 0.75}),)),
        (e.RunHeld("the journal: No space left on device"), ()),
        (e.EngineLost("e0", "gone"), (c.ReviveEngine("e0", "gone"),)),
        (
            e.TimerFired(),
            (
                c.NoteStale(ids[2], "dropped", 7, "v9 trains"),
                c.NoteDiscarded(ids[3], 5, "late"),
                c.PutOff(1, task, 2, 7, (8, 9), (ids[0], ids[1]), (0.5, 1.0), "cut off"),
                c.NoteLengths("arithmetic", 30, 100.0, 0.7, 0.6, 0.02, 300.0, 25, 0.5, 0.5, 0.9),
                c.SplitGroup(0, 1, (ids[2],), "it goes on later"),
                c.NoteLate(ids[2], "it is beyond the cut-off"),
                c.NoteReferences(1, (0.5, 1.0), "its siblings ended before"),
            ),
        ),
        (e.RunFailed("OSError: no space"), (c.FinishRun("failed", "OSError: no space"),)),
        (e.ShutdownRequested("Ctrl-C"), (c.FinishRun("stopped", "Ctrl-C"),)),
    ]
