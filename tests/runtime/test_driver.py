"""Whole runs of the asyncio runtime on virtual time, in a world that stalls, fails and reorders.

`run_driver` gives every decision to `Invariants` and raises when a task, a call or a permit is left, or an exception
was lost; so most tests here only have to say what the world does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from paceline.config import EvalSection, Limits
from paceline.core.processing import GroupRules
from paceline.core.streams import key, uniform
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import PackedBatch
from paceline.domain.commands import Command
from paceline.domain.task import Task
from paceline.envs import Context, Model, Result
from paceline.errors import (
    EngineError,
    EnvError,
    InvariantError,
    NoProgressError,
    PacelineError,
    TrainerError,
)
from paceline.journal.lines import line_of
from paceline.ports import GenerateRequest, Shipment
from paceline.runtime.driver import ComponentFailed
from paceline.testing import (
    Controls,
    DriverRun,
    MemoryJournal,
    ScriptedEngine,
    ScriptedEnv,
    ScriptedTrainer,
    chaos,
    follow,
    one_call,
    run_driver,
    setup_for,
    train_env,
)


def alone(env: str) -> GroupRules:
    """Groups of one have no siblings to compare with, so here they train without."""
    return GroupRules(env=env, seq_len=512, zero_advantage=False)


def wild_engine(seed: int, number: int) -> ScriptedEngine:
    def chance(what: str, request: GenerateRequest) -> float:
        return uniform(key(seed, what, request.request_id, len(request.token_ids)), number)

    tries: dict[int, int] = {}

    def load_error(version: int) -> str | None:
        tries[version] = tries.get(version, 0) + 1
        return (
            "no space" if tries[version] == 1 and uniform(key(seed, "load", version), number) < 0.2 else None
        )

    return ScriptedEngine(
        f"e{number}",
        answer=lambda request: (
            EngineError("503") if chance("fails", request) < 0.05 else "answer"[: 1 + number]
        ),
        seconds=lambda request: (
            float("inf") if chance("hangs", request) < 0.03 else 0.1 / max(0.03, chance("s", request))
        ),
        load_s=lambda version: 3 * uniform(key(seed, "load_s", version), number),
        load_error=load_error,
        revive_s=4.0,
        is_deaf=number == 1,
    )


def wild(seed: int, *, stop_at: float | None = None, journal: MemoryJournal | None = None) -> DriverRun:
    script = chaos(seed)
    assert script.plan is not None
    course = follow(script.plan)
    evals = [EvalSection(id="held", examples=3, k=2, every=2)]
    setup = setup_for(
        train_env("a", group_size=2, max_attempts=2),
        train_env("b", group_size=3, tasks_per_minute=40, on_stale="mask_tokens"),
        lag=seed % 4,
        max_staleness=max(seed % 4, 2),
        max_steps=5,
        evals=evals,
        seed=seed,
        checkpoint_every=2,
        seq_len=512,
    )
    return run_driver(
        setup,
        {name: ScriptedEnv(course) for name in ("a", "b", "held")},
        engines=[wild_engine(seed, 0), wild_engine(seed, 1)],
        trainer=lambda: ScriptedTrainer(train_s=script.train_s, ship_s=0.1),
        cap=4,
        limits=Limits(deadline_s=30.0, score_s=5.0),
        poll_s=5.0,
        during=None if stop_at is None else lambda controls: controls.at(stop_at, controls.shut_down),
        journal=journal,
        durable_first=journal is not None,
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_run_in_a_wild_world_ends_and_leaves_nothing_behind(seed: int) -> None:
    run = wild(seed)
    assert run.finish is not None
    assert run.finish.status == "done"
    assert [packed.batch.step for packed in run.trainer.batches] == [1, 2, 3, 4, 5]
    launched = {c.rollout for _, c in run.commands(do.StartRollout)}
    assert sorted(r.id for r in run.rollouts) == sorted(launched)
    assert {0, 5} <= {c.version for _, c in run.commands(do.ReportEval)}
    granted, ended = (
        run.commands(do.GrantTurn),
        [e for _, e, _ in run.journal.entries if isinstance(e, on.SegmentEnded)],
    )
    assert len(granted) == len(ended), "every grant is answered once"


@pytest.mark.parametrize("seed", range(8))
def test_a_shutdown_at_any_moment_stops_everything_and_saves(seed: int) -> None:
    stop_at = 40 * uniform(key(seed, "stop"), 0)
    run = wild(seed, stop_at=stop_at)
    assert run.finish is not None
    if run.finish.status == "stopped":
        assert run.seconds <= stop_at + 16.0, "a deaf engine costs its request three times STOP_S at most"
        assert run.checkpoints[-1][0] == run.core.cut


class SlowDisk(MemoryJournal):
    """Takes a while over each flush."""

    def __init__(self, flush_s: float) -> None:
        super().__init__()
        self._flush_s = flush_s
        self.durable = 0
        """Decisions that are on it."""

    async def flush(self) -> None:
        until = len(self.entries)
        await asyncio.sleep(self._flush_s)
        self.durable = max(self.durable, until)

    def has(self, kind: type[Command], of: Callable[[Any], bool]) -> bool:
        """Whether it holds the decision that made this command."""
        safe = self.entries[: self.durable]
        return any(isinstance(c, kind) and of(c) for _, _, commands in safe for c in commands)


@pytest.mark.parametrize("seed", range(12))
def test_a_wild_world_ends_the_same_way_when_all_waits_for_a_slow_disk(seed: int) -> None:
    run = wild(seed, journal=SlowDisk((0.001, 0.1, 7.0)[seed % 3]), stop_at=17.0 if seed % 4 == 3 else None)
    assert run.finish is not None
    assert run.finish.status in ("done", "stopped")
    launched = {c.rollout for _, c in run.commands(do.StartRollout)}
    assert sorted(r.id for r in run.rollouts) == sorted(launched)


def test_nothing_follows_from_a_record_before_it_is_durable() -> None:
    disk = SlowDisk(0.05)
    too_soon: list[str] = []

    async def course(task: Task, model: Model, ctx: Context) -> Result:
        if not disk.has(do.StartRollout, lambda c: c.rollout == ctx.rollout):
            too_soon.append(f"{ctx.rollout} ran")
        return await one_call(task, model, ctx)

    class Trainer(ScriptedTrainer):
        async def ship(self, packed: PackedBatch) -> Shipment:
            if not disk.has(do.ShipBatch, lambda c: c.batch.step == packed.batch.step):
                too_soon.append(f"batch {packed.batch.step} was shipped")
            return await super().ship(packed)

    run = run_driver(
        setup_for(seq_len=512),
        {"env": ScriptedEnv(course)},
        trainer=Trainer,
        journal=disk,
        durable_first=True,
    )
    assert run.finish is not None
    assert run.finish.status == "done"
    assert not too_soon
    # A turn waits for no disk: its engine gets the call when it was asked for.
    assert run.seconds < 40


def test_a_seed_repeats_its_run() -> None:
    def told(run: DriverRun) -> bytes:
        decisions = [
            (at, type(event).__name__, [str(line_of(c)) for c in commands])
            for at, event, commands in run.journal.entries
        ]
        return msgspec.msgpack.encode((decisions, run.checkpoints))

    assert told(wild(3)) == told(wild(3))
    assert told(wild(3)) != told(wild(4))


def test_a_checkpoint_is_made_after_a_minute_however_few_steps_it_has_been() -> None:
    setup = msgspec.structs.replace(setup_for(max_steps=9, seq_len=512), checkpoint_every_s=60.0)
    run = run_driver(
        setup, {"env": ScriptedEnv()}, trainer=lambda: ScriptedTrainer(train_s=lambda _step: 45.0)
    )
    saves = run.commands(do.SaveCheckpoint)
    assert {command.reason for _, command in saves[:-1]} == {"every 60 s"}
    times = [at for at, _ in saves]
    assert len(times) > 3
    assert all(60.0 <= after - before <= 110.0 for before, after in pairwise(times[:-1]))


def test_a_run_goes_on_from_its_checkpoint() -> None:
    setup = setup_for(train_env(tasks=20, epochs=1), max_steps=100, seq_len=512)
    first = run_driver(
        setup, {"env": ScriptedEnv()}, during=lambda controls: controls.at(4.5, controls.shut_down), cap=6
    )
    assert first.finish is not None
    assert first.finish.status == "stopped"
    step, state = first.checkpoints[-1]
    second = run_driver(
        setup, {"env": ScriptedEnv()}, state=state, engines=[ScriptedEngine(version=step)], cap=6
    )
    assert second.finish is not None
    assert second.finish.status == "done"
    samples = [s for run in (first, second) for packed in run.trainer.batches for s in packed.batch.samples]
    assert sorted(s.task_index for s in samples) == sorted(2 * list(range(20)))


# ── cases ──


def test_s01_a_member_that_cancels_itself_is_recorded_and_its_group_closes() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        if ctx.rollout.member == 2:
            raise asyncio.CancelledError
        return Result(reward=float(ctx.rollout.member == 0))

    setup = setup_for(train_env(tasks=1, epochs=1, group_size=4), seq_len=512)
    run = run_driver(setup, {"env": ScriptedEnv(course)}, cap=4)
    outcomes = [(r.outcome.ending, r.outcome.cause) for r in sorted(run.rollouts, key=lambda r: r.id)]
    assert outcomes == [("completed", None)] * 2 + [("cancelled", "self")] + [("completed", None)]
    [processed] = [e for _, e, _ in run.journal.entries if isinstance(e, on.GroupProcessed)]
    advantages = {v.rollout.member: v.advantage for v in processed.result.verdicts}
    assert advantages == {
        0: pytest.approx(2 / 3),
        1: pytest.approx(-1 / 3),
        2: None,
        3: pytest.approx(-1 / 3),
    }
    assert (len(run.core.flights), run.core.fleet.free(), len(run.core.groups)) == (0, 4, 0)


def test_s02_rollouts_that_take_their_time_to_stop_hold_their_permits_until_they_have() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        if ctx.rollout.group in (2, 3, 4):
            try:
                await ctx.sleep(1000.0)
            finally:
                await ctx.sleep(ctx.rollout.group - 1.5)  # one after the other: 0.5 s, 1.5 s, 2.5 s
        return Result(reward=1.0)

    setup = setup_for(train_env(group_size=1), batch=2, lag=2, max_staleness=2, max_steps=12, seq_len=512)
    run = run_driver(
        setup,
        {"env": ScriptedEnv(course)},
        cap=5,
        rules=alone,
        trainer=lambda: ScriptedTrainer(train_s=lambda _step: 0.5),
    )
    stale = [(at, c.rollout) for at, c in run.commands(do.CancelRollout) if c.cause == "stale"]
    assert sorted(r.group for _, r in stale) == [2, 3, 4]
    ended = {r.id: r.ended for r in run.rollouts}
    assert [round(ended[r] - at, 3) for at, r in stale] == [0.5, 1.5, 2.5]
    starts = [at for at, _ in run.commands(do.StartRollout)]
    assert all(any(at >= ended[r] and at - ended[r] < 0.01 for at in starts) for _, r in stale)


def test_s05_a_permit_comes_back_when_a_rollout_fails_at_once() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        if ctx.rollout.group < 3:
            raise RuntimeError("no sandbox")
        return await one_call(task, model, ctx)

    setup = setup_for(train_env(tasks=10, epochs=1, group_size=1), seq_len=512)
    run = run_driver(setup, {"env": ScriptedEnv(course, tasks=10)}, cap=3, rules=alone)
    assert len(run.commands(do.StartRollout)) == 10
    assert run.core.fleet.free() == 3
    failed = [r.outcome for r in run.rollouts if r.outcome.ending == "failed"]
    assert len(failed) == 3
    assert all("RuntimeError" in outcome.detail for outcome in failed)


def test_s08_a_version_is_taken_in_and_a_stop_obeyed_while_the_cap_is_full() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        if ctx.rollout.group:
            await ctx.sleep(60.0)
        return Result(reward=1.0)

    seen: list[int] = []

    def during(controls: Controls) -> None:
        controls.at(1.01, lambda: seen.append(controls.core.fleet.held))
        controls.at(2.0, controls.shut_down)

    setup = setup_for(train_env(group_size=1), batch=1, seq_len=512)
    run = run_driver(
        setup,
        {"env": ScriptedEnv(course)},
        engines=[ScriptedEngine(seconds=lambda _request: 0.5)],
        trainer=lambda: ScriptedTrainer(train_s=lambda _step: 0.5),
        cap=1,
        rules=alone,
        during=during,
    )
    assert seen == [1]
    assert run.finish is not None
    assert (run.finish.status, run.seconds) == ("stopped", 2.0)


def test_s09_one_failure_leaves_its_finished_siblings_alone() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        if (ctx.rollout.group, ctx.rollout.member) == (0, 1):
            await ctx.sleep(2.0)
            raise RuntimeError("boom")
        return Result(reward=float(ctx.rollout.member == 0))

    setup = setup_for(train_env(tasks=2, epochs=1, group_size=4), batch=8, max_steps=1, seq_len=512)
    run = run_driver(setup, {"env": ScriptedEnv(course)}, cap=8)
    assert not run.commands(do.CancelRollout)
    assert sorted(r.outcome.ending for r in run.rollouts) == ["completed"] * 7 + ["failed"]
    assert len(run.trainer.batches[0].batch.rollouts) == 7
    [failed] = [r for r in run.rollouts if r.outcome.ending == "failed"]
    assert "boom" in failed.outcome.detail


def broken(controls: Controls) -> None:
    async def part() -> None:
        await asyncio.sleep(3.0)
        raise RuntimeError("boom")

    controls.beside("dashboard", part)


class BrokenJournal(MemoryJournal):
    def append(self, at: float, event: on.Event, commands: object) -> None:
        if at > 3.0:
            raise RuntimeError("boom")


class FullDisk(MemoryJournal):
    def __init__(self, *kinds: type) -> None:
        super().__init__()
        self._kinds = kinds

    async def flush(self) -> None:
        """Fails once a command of these kinds has to be made durable."""
        if any(isinstance(command, self._kinds) for _, _, commands in self.entries for command in commands):
            raise OSError(28, "No space left on device")


def at_two(step: int) -> BaseException | None:
    return RuntimeError("boom") if step == 2 else None


@pytest.mark.parametrize(
    ("component", "setting"),
    [
        ("batch shipper", {"trainer": lambda: ScriptedTrainer(ship_error=at_two)}),
        ("policy watcher", {"trainer": lambda: ScriptedTrainer(publish_error=at_two)}),
        ("dashboard", {"during": broken}),
        ("RuntimeError: boom", {"journal": BrokenJournal()}),
        ("saving of the checkpoint", {"journal": FullDisk(do.SaveCheckpoint)}),
        ("batch shipper", {"journal": FullDisk(do.ShipBatch)}),
    ],
)
def test_s60_an_error_in_any_part_ends_the_run_and_names_it(
    component: str, setting: dict[str, object]
) -> None:
    setup = setup_for(max_steps=50, seq_len=512, checkpoint_every=3)
    env = ScriptedEnv()
    with pytest.raises((PacelineError, OSError, RuntimeError)) as caught:
        run_driver(setup, {"env": env}, **setting, max_seconds=60)  # type: ignore[arg-type]
    told = "\n".join(
        (f"{type(caught.value).__name__}: {caught.value}", *getattr(caught.value, "__notes__", ()))
    )
    assert component in told
    assert "boom" in told or "No space left" in told
    assert env.running == 0, "its rollouts were torn down"


def test_s60_what_the_core_refuses_ends_the_run() -> None:
    env = ScriptedEnv()
    with pytest.raises(InvariantError, match="e9"):
        run_driver(
            setup_for(max_steps=50, seq_len=512),
            {"env": env},
            during=lambda controls: controls.at(2.5, lambda: controls.post(on.EngineLost("e9", "gone"))),
            max_seconds=60,
        )
    assert env.running == 0


def test_s60_a_metrics_reading_that_fails_does_not_end_the_run() -> None:
    class Mute(ScriptedEngine):
        async def load(self) -> object:  # type: ignore[override]
            raise RuntimeError("boom")

    run = run_driver(setup_for(seq_len=512), {"env": ScriptedEnv()}, engines=[Mute()], poll_s=1.0)
    assert run.finish is not None
    assert run.finish.status == "done"
    assert on.LoadReported("e0", None) in [event for _, event, _ in run.journal.entries]


def test_a_run_in_which_nothing_can_train_ends_with_the_cause() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        raise ValueError("no such table")

    env = ScriptedEnv(course)
    with pytest.raises(NoProgressError, match="no such table"):
        run_driver(setup_for(dead_group_limit=6, seq_len=512), {"env": env})
    assert env.running == 0


def test_an_engine_that_never_loads_ends_the_run_with_the_cause() -> None:
    engine = ScriptedEngine(load_error=lambda _version: "CUDA out of memory")
    with pytest.raises(EngineError, match="CUDA out of memory"):
        run_driver(setup_for(seq_len=512), {"env": ScriptedEnv()}, engines=[engine])
    assert engine.updates == [1, 1, 1]


def test_of_two_engines_the_one_that_cannot_load_is_taken_out_and_the_run_ends_without_it() -> None:
    engines = [ScriptedEngine("e0"), ScriptedEngine("e1", load_error=lambda _version: "disk full")]
    run = run_driver(
        setup_for(max_steps=5, seq_len=512), {"env": ScriptedEnv()}, engines=engines, max_seconds=200
    )
    assert run.finish is not None
    assert run.finish.status == "done"
    assert len(run.trainer.batches) == 5
    assert engines[1].updates == [1, 1, 1]


def test_an_engine_that_comes_back_is_used_again_once_it_has_loaded() -> None:
    engines = [
        ScriptedEngine("e0"),
        ScriptedEngine("e1", load_error=lambda version: "disk full" if version == 1 else None, revive_s=2.0),
    ]
    run = run_driver(setup_for(max_steps=8, seq_len=512), {"env": ScriptedEnv()}, engines=engines)
    assert run.finish is not None
    assert run.finish.status == "done"
    assert engines[1].version == 8
    back = next(at for at, e, _ in run.journal.entries if isinstance(e, on.EngineJoined) and at > 0)
    assert any(c.engine == "e1" and at > back for at, c in run.commands(do.StartRollout))


def test_a_trainer_that_goes_on_from_elsewhere_is_told_so() -> None:
    class Other(ScriptedTrainer):
        async def next(self):  # type: ignore[no-untyped-def]
            return replace_version(await super().next())

    def replace_version(published):  # type: ignore[no-untyped-def]
        return msgspec.structs.replace(published, version=published.version + 100)

    with pytest.raises(TrainerError, match="v101"):
        run_driver(setup_for(seq_len=512), {"env": ScriptedEnv()}, trainer=Other)


# ── the kit ──


def test_an_aborted_request_keeps_its_tokens_and_tokens_know_the_version_that_sampled_them() -> None:
    engine = ScriptedEngine(
        answer=lambda _request: "123456789",
        seconds=lambda request: 10.0 if len(request.token_ids) == 2 else 25.0,
    )

    async def course(task: Task, model: Model, ctx: Context) -> Result:
        if ctx.rollout.group < 2:
            await model.generate([1, 2])
        else:
            await model.chat("go")
        return Result(reward=float(ctx.rollout.member))

    setup = setup_for(lag=4, max_staleness=4, max_steps=2, seq_len=512)
    run = run_driver(setup, {"env": ScriptedEnv(course)}, engines=[engine], cap=8)
    turns = [turn for rollout in run.rollouts for turn in rollout.turns]
    assert any(len(turn.versions) > 1 for turn in turns), "an update came in the middle of a call"
    cut = [r for r in run.rollouts if r.outcome.ending == "cancelled" and r.sampled_tokens]
    assert cut, "what was cancelled at the end kept its tokens"
    assert all(sum(n for _, n in turn.versions) == len(turn.sampled_ids) for turn in turns)


def test_the_kit_says_what_a_run_left_behind() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        course.stray = asyncio.get_running_loop().create_task(asyncio.sleep(1e6), name="stray")  # type: ignore[attr-defined]
        return Result(reward=float(ctx.rollout.member))

    with pytest.raises(InvariantError, match="stray"):
        run_driver(setup_for(max_steps=1, seq_len=512), {"env": ScriptedEnv(course)})


def test_a_run_that_does_not_end_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        run_driver(
            setup_for(max_steps=10_000, seq_len=512),
            {"env": ScriptedEnv()},
            trainer=lambda: ScriptedTrainer(train_s=lambda _step: 1e9),
            max_seconds=100.0,
        )


def test_an_environment_that_leaves_a_task_behind_does_not_end_the_run() -> None:
    left = []

    async def leaves(task: Task, model: Model, ctx: Context) -> Result:
        async def later() -> None:
            await asyncio.sleep(0.5)
            await model.chat("again")

        left.append(asyncio.create_task(later()))
        if ctx.rollout.group > 6:
            await asyncio.sleep(1)  # the last ones of the run have ended when it ends
        return await one_call(task, model, ctx)

    run = run_driver(setup_for(seq_len=512, max_steps=2), {"env": ScriptedEnv(leaves)}, max_seconds=1000)
    assert run.finish is not None
    assert run.finish.status == "done"


def test_a_stop_does_not_wait_for_weights_that_nobody_will_sample() -> None:
    run = run_driver(
        setup_for(seq_len=512),
        {"env": ScriptedEnv()},
        engines=[ScriptedEngine(load_s=lambda _version: 5000.0)],
        during=lambda controls: controls.at(50.0, controls.shut_down),
    )
    assert run.finish == do.FinishRun("stopped", "Ctrl-C")
    assert run.seconds < 60


def test_the_journal_ends_with_the_event_that_the_core_refused_and_with_the_failure() -> None:
    journal = MemoryJournal()
    with pytest.raises(TrainerError, match="published v7"):
        run_driver(
            setup_for(seq_len=512),
            {"env": ScriptedEnv()},
            journal=journal,
            during=lambda controls: controls.at(1.5, lambda: controls.post(on.PolicyPublished(7, "w"))),
        )
    _, event, commands = journal.entries[-2]
    assert (event, commands) == (on.PolicyPublished(7, "w"), ())
    _, event, commands = journal.entries[-1]
    assert isinstance(event, on.RunFailed)
    assert "published v7" in event.error
    assert [type(command) for command in commands] == [do.FinishRun]


def test_a_part_that_cancels_itself_ends_the_run_by_its_name() -> None:
    async def part() -> None:
        await asyncio.sleep(2)
        raise asyncio.CancelledError

    with pytest.raises(ComponentFailed, match="the spare part failed: CancelledError"):
        run_driver(
            setup_for(seq_len=512),
            {"env": ScriptedEnv()},
            during=lambda controls: controls.beside("spare part", part),
        )


def test_code_that_cancels_whatever_tasks_it_finds_ends_the_run_and_leaves_no_rollout_behind() -> None:
    async def cancels(task: Task, model: Model, ctx: Context) -> Result:
        await ctx.sleep(3)
        for found in asyncio.all_tasks():
            if found.get_name() == "rollouts":
                found.cancel()
        return await one_call(task, model, ctx)

    with pytest.raises(ComponentFailed, match="the rollouts failed: CancelledError"):
        run_driver(setup_for(seq_len=512), {"env": ScriptedEnv(cancels)}, max_seconds=1000)


def test_what_an_environment_raises_while_the_run_is_stopped_does_not_leave_the_loop() -> None:
    async def interrupts(task: Task, model: Model, ctx: Context) -> Result:
        try:
            await ctx.sleep(1000)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        raise AssertionError

    async def part() -> None:
        await asyncio.sleep(2)
        raise EnvError("gone")

    with pytest.raises(EnvError, match="gone"):
        run_driver(
            setup_for(seq_len=512),
            {"env": ScriptedEnv(interrupts)},
            during=lambda controls: controls.beside("spare part", part),
        )


def test_an_environments_own_time_limits_are_no_failures_of_its_engine() -> None:
    async def impatient(task: Task, model: Model, ctx: Context) -> Result:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await model.chat("think")
        return await one_call(task, model, ctx)

    tries: Counter[str] = Counter()

    def slow_at_first(request: GenerateRequest) -> float:
        tries[request.request_id] += 1
        return 5.0 if tries[request.request_id] == 1 else 0.1

    run = run_driver(
        setup_for(seq_len=512),
        {"env": ScriptedEnv(impatient)},
        engines=[ScriptedEngine(seconds=slow_at_first)],
    )
    assert run.finish is not None
    assert run.finish.status == "done"
    assert not run.commands(do.ReviveEngine)


def test_s01_members_that_cancel_their_own_task_do_not_stall_the_run() -> None:
    async def cancels_itself(task: Task, model: Model, ctx: Context) -> Result:
        if ctx.rollout.group % 3 == 0 and ctx.rollout.member == 0:
            own = asyncio.current_task()
            assert own is not None
            own.cancel()
        return await one_call(task, model, ctx)

    run = run_driver(setup_for(seq_len=512), {"env": ScriptedEnv(cancels_itself)}, max_seconds=1000)
    assert run.finish is not None
    assert run.finish.status == "done"


def test_a_rollout_that_never_stops_ends_the_run_by_its_name() -> None:
    async def deaf(task: Task, model: Model, ctx: Context) -> Result:
        for _ in range(80):  # seconds enough; a test must come to its end
            with contextlib.suppress(asyncio.CancelledError):
                await ctx.sleep(1e9)
        raise AssertionError

    with pytest.raises(
        EnvError, match=r"rollout g\d+.* of env 'env' did not stop within 300 s of being cancelled"
    ):
        run_driver(setup_for(seq_len=512), {"env": ScriptedEnv(deaf)}, limits=Limits(deadline_s=10))
