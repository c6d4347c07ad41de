"""The whole core over random worlds: `Invariants` looks after every decision, the tests at the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline.config import EvalSection
from paceline.core.admission.base import Admission
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Outcome
from paceline.errors import EngineError, InvariantError, NoProgressError, TrainerError
from paceline.testing import Invariants, Plan, Script, World, alternating, chaos, setup_for, train_env

FAST = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a run takes too long to shrink; its seed is the bug report
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

envs = st.lists(
    st.builds(
        lambda size, group, attempts, rate, stale, epochs: (size, group, attempts, rate, stale, epochs),
        st.sampled_from([None, 3, 7, 20]),
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from([None, 20.0, 120.0]),
        st.sampled_from(["drop", "drop", "train", "mask_tokens"]),
        st.sampled_from([1, 2, None]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def setups(draw: st.DrawFn) -> CoreSetup:
    lag = draw(st.integers(0, 4))
    by_tokens = draw(st.booleans())
    return setup_for(
        *(
            train_env(
                f"env{i}",
                tasks=size,
                group_size=group,
                max_attempts=attempts,
                tasks_per_minute=rate,
                on_stale=stale,
                epochs=epochs,
                sampler=draw(st.sampled_from(["shuffled", "sequential"])),
                weight=draw(st.sampled_from([1.0, 3.0])),
            )
            for i, (size, group, attempts, rate, stale, epochs) in enumerate(draw(envs))
        ),
        batch=draw(st.integers(4, 8)),
        batch_tokens=draw(st.integers(20, 120)) if by_tokens else None,
        lag=lag,
        max_staleness=draw(st.integers(lag, 4)),
        max_steps=draw(st.integers(1, 6)),
        evals=[
            EvalSection(
                id=f"held{i}", examples=draw(st.integers(1, 3)), k=draw(st.integers(1, 3)), every=every
            )
            for i, every in enumerate(draw(st.lists(st.integers(1, 3), max_size=2)))
        ],
        eval_share=draw(st.sampled_from([0.1, 0.5, 1.0])),
        seed=draw(st.integers(0, 1000)),
        short_last=draw(st.booleans()),
        checkpoint_every=draw(st.integers(1, 4)),
        seq_len=draw(st.sampled_from([12, 64])),
    )


@dataclass(frozen=True)
class Hands:
    """What is done to a run from outside."""

    lose_at: float | None = None
    back_after: float | None = None
    stop_at: float | None = None

    def lay_on(self, world: World) -> None:
        if self.lose_at is not None:
            world.at(self.lose_at, lambda: world.lose("e0"))
            if self.back_after is not None:
                world.at(self.lose_at + self.back_after, lambda: _back(world))
        if self.stop_at is not None:
            world.at(self.stop_at, world.shut_down)


def _back(world: World) -> None:
    if world.core.fleet["e0"].out is not None:
        world.join("e0", 0)


moments = st.one_of(st.none(), st.floats(0.0, 60.0))
hands = st.builds(
    Hands, lose_at=moments, back_after=st.one_of(st.none(), st.floats(0.0, 20.0)), stop_at=moments
)


def world_of(
    setup: CoreSetup, seed: int, engines: int, cap: int, failures: float, done: Hands, state: Any = None
) -> World:
    # A group of one never has a signal: where there are such, rollouts train without.
    alone = any(spec.group_size == 1 for spec in setup.train)
    world = World(
        setup,
        chaos(seed, failures=failures),
        engines=engines,
        cap=cap,
        state=state,
        rules=lambda env: GroupRules(env=env, seq_len=setup.seq_len, zero_advantage=not alone),
        watch=Invariants(),
    )
    done.lay_on(world)
    return world


@FAST
@given(setups(), st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 8), st.floats(0, 0.6), hands)
def test_every_run_ends_with_nothing_lost_nothing_twice_and_no_bound_passed(
    setup: CoreSetup, seed: int, engines: int, cap: int, failures: float, done: Hands
) -> None:
    world = world_of(setup, seed, engines, cap, failures, done)
    trace = world.run(events=30_000)
    assert trace.finish is not None, "the run stands still, or never ends"
    assert trace.finish.status == ("stopped" if world.core._stopping else "done")
    assert {c.rollout for c in trace.launched} == {r.id for r in trace.ended}
    assert len(trace.launched) == len(trace.ended)
    assert world.now < 20_000
    if trace.finish.status == "done":
        endless = all(spec.source.size is None or spec.source.epochs is None for spec in setup.train)
        assert len(trace.batches) == setup.max_steps or not endless
        full = trace.batches[:-1] if setup.short_last else trace.batches
        for batch in full:
            if setup.target_rollouts is not None:
                assert len(batch.rollouts) == setup.target_rollouts
            else:
                assert batch.tokens >= (setup.target_tokens or 0)


@FAST
@given(setups(), st.integers(0, 10**6), hands)
def test_the_same_seed_gives_the_same_journal(setup: CoreSetup, seed: int, done: Hands) -> None:
    first, second = (world_of(setup, seed, 2, 4, 0.2, done).run(until=200).encoded() for _ in range(2))
    assert first == second


@FAST
@given(setups(), st.integers(0, 10**6), st.integers(0, 400))
def test_a_run_goes_on_from_any_checkpoint_and_redraws_what_was_under_way(
    setup: CoreSetup, seed: int, killed_after: int
) -> None:
    first = world_of(setup, seed, 2, 4, 0.1, Hands())
    first.run(events=killed_after)
    if not first.trace.checkpoints:
        return
    step, state = first.trace.checkpoints[-1]
    second = world_of(setup, seed + 1, 2, 4, 0.1, Hands(), state)
    second.run(events=30_000)
    assert second.trace.finish is not None
    assert [batch.step for batch in second.trace.batches] == list(
        range(step + 1, step + 1 + len(second.trace.batches))
    )
    twice = {r for b in first.trace.batches if b.step <= step for r in b.rollouts}
    assert not twice.intersection(r for b in second.trace.batches for r in b.rollouts)


@FAST
@given(st.integers(0, 10**6), st.floats(0.5, 60.0))
def test_a_stopped_run_and_its_resumption_draw_every_task_of_an_epoch_once(seed: int, stop_at: float) -> None:
    setup = setup_for(train_env(tasks=20, epochs=1), batch=4, max_steps=50, seed=seed)
    script = replace(chaos(seed, failures=0.0), reward=alternating)
    first = World(setup, script, engines=2, cap=4, watch=Invariants())
    first.at(stop_at, first.shut_down)
    first.run()
    groups = first.trace.shipped_groups()
    if first.trace.finish and first.trace.finish.status == "stopped":
        second = World(
            setup, script, engines=2, cap=4, state=first.trace.checkpoints[-1][1], watch=Invariants()
        )
        second.run()
        assert second.trace.finish is not None
        groups |= second.trace.shipped_groups()
        ended = [*first.trace.results.values(), *second.trace.results.values()]
    else:
        ended = list(first.trace.results.values())
    # Dead by itself, not because the end cut it short: such a task has had its turn.
    dead = [
        r for r in ended if r.dead and len(r.verdicts) == 2 and all(v.fate != "cancelled" for v in r.verdicts)
    ]
    assert len(set(groups.values())) == len(groups)
    assert len(groups) + len(dead) == 20


@pytest.mark.parametrize("lag", range(5))
def test_with_no_faults_every_step_is_at_most_lag_steps_stale(lag: int) -> None:
    setup = setup_for(lag=lag, max_staleness=lag, max_steps=12)
    trace = World(setup, Script(reward=alternating), cap=4, watch=Invariants()).run()
    assert [b.step for b in trace.batches] == list(range(1, 13))
    worst = max(b.trains - s.oldest_version for b in trace.batches for s in b.samples)
    assert worst <= lag


def test_a_higher_lag_never_makes_a_slow_trainer_slower() -> None:
    ends = []
    for lag in (0, 1, 2):
        script = Script(seconds=lambda _r, _t: 4.0, reward=alternating, train_s=lambda _s: 4.0)
        world = World(setup_for(lag=lag, max_steps=10), script, cap=4)
        world.run()
        ends.append(world.now)
    assert ends[0] > 1.4 * ends[1]
    assert ends[2] <= ends[1]


def test_evals_and_training_share_the_cap_and_neither_waits_for_the_other() -> None:
    section = EvalSection(id="held", examples=10, k=2, every=1)
    setup = setup_for(evals=[section], eval_share=0.25, max_steps=6)
    most = 0

    def watch(world: World, event: on.Event, commands: list[do.Command]) -> None:
        nonlocal most
        Invariants.__call__(invariants, world, event, commands)
        if world.core.flights.trains:
            most = max(most, world.core.flights.evals)

    invariants = Invariants()
    trace = World(setup, Script(reward=alternating, train_s=lambda _s: 0.1), cap=8, watch=watch).run()
    assert [(r.version, r.rollouts) for r in trace.evals] == [(v, 20) for v in range(7)]
    assert len(trace.batches) == 6
    assert most >= 2


@pytest.mark.parametrize(("share", "evals"), [(0.25, 2), (0.5, 4)])
def test_evals_without_an_end_never_stop_training(share: float, evals: int) -> None:
    section = EvalSection(id="held", examples=10, k=2, every=100)
    setup = setup_for(evals=[section], eval_share=share, max_steps=6, batch=8)
    script = Script(reward=alternating, seconds=lambda _r, task: 1e6 if task.split == "eval" else 1.0)
    world = World(setup, script, cap=8, watch=Invariants())
    trace = world.run(until=100.0)
    assert len(trace.batches) == 6
    first = trace.shipped_at[0]
    held = [c for at, c in trace.timed(do.StartRollout) if c.task.split == "eval" and at < first]
    assert len(held) == evals


def test_an_eval_is_still_measured_when_the_engine_that_held_it_up_is_lost() -> None:
    section = EvalSection(id="held", examples=1, every=2, at_start=False)
    setup = setup_for(evals=[section], max_steps=2)
    script = Script(reward=alternating, load_s=lambda engine, _v: 1e6 if engine == "e1" else 0.0)
    world = World(setup, script, engines=2, cap=4, watch=Invariants())
    world.at(50.0, lambda: world.lose("e1"))
    world.at(60.0, lambda: None)
    trace = world.run(until=1000)
    assert trace.finish is not None
    assert [r.version for r in trace.evals] == [2]


def test_a_rollout_that_ended_at_the_gate_of_a_lost_engine_is_not_moved() -> None:
    setup = setup_for(max_steps=2, lag=4, max_staleness=4)
    script = Script(
        plan=lambda r, _t: Plan(((0.0, 1.0), (0.0, 1.0), (0.0, 1.0)), reward=float(r.member)),
        load_s=lambda engine, _v: 30.0 if engine == "e1" else 0.0,
        deadline_s=5.0,
    )
    world = World(setup, script, engines=2, cap=4, watch=Invariants())
    world.at(20.0, lambda: world.lose("e1"))
    assert world.run().finish is not None


def test_what_a_lost_engine_was_loading_says_nothing_about_the_one_that_came_back() -> None:
    setup = setup_for(max_steps=6, lag=2)
    script = Script(reward=alternating, load_s=lambda engine, _v: 7.0 if engine == "e1" else 0.1)
    world = World(setup, script, engines=2, cap=4, watch=Invariants())
    world.at(4.0, lambda: world.lose("e1"))
    world.at(5.0, lambda: world.join("e1", 0))
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"


class ParksOnce(Admission):
    """Room for four until it parks what it is told to."""

    def __init__(self) -> None:
        self.excess = 0

    def cap(self, engine: EngineId) -> int:
        return 4

    def room(self, engine: EngineId, active: int) -> int:
        return -1 if self.excess else 4 - active

    def to_park(self, engine: EngineId, active: int) -> int:
        return self.excess

    def reason(self, engine: EngineId) -> str:
        return "as told"


def test_a_rollout_that_was_parked_while_there_was_no_engine_waits_to_be_resumed() -> None:
    admission = ParksOnce()
    core = Core(setup_for(), admission)
    core.handle(on.RunOpened("run", 0), 0.0)
    started = core.handle(on.EngineJoined(EngineInfo("e0", None, None), 0), 0.0)
    waits = next(c.rollout for c in started if isinstance(c, do.StartRollout))
    core.handle(on.EngineLost("e0", "gone"), 1.0)
    core.handle(on.TurnRequested(waits, 5, 10), 2.0)
    admission.excess = 4
    core.handle(on.LoadReported("e0", EngineLoad(4, 0, 0.99, 3)), 3.0)
    back = core.handle(on.EngineJoined(EngineInfo("e0", None, None), 0), 4.0)
    assert not [c for c in back if isinstance(c, do.GrantTurn)]
    admission.excess = 0
    resumed = core.handle(on.LoadReported("e0", EngineLoad(0, 0, 0.0, 3)), 5.0)
    assert [c.rollout for c in resumed if isinstance(c, do.ResumeRollout)][:1] == [waits]
    assert [c.rollout for c in resumed if isinstance(c, do.GrantTurn)] == [waits]


def test_two_limited_environments_never_make_a_storm_of_alarms() -> None:
    setup = setup_for(
        train_env("a", tasks_per_minute=20), train_env("b", tasks_per_minute=30), max_steps=20, batch=4
    )
    world = World(setup, Script(reward=alternating), cap=8, watch=Invariants())
    trace = world.run()
    assert len(trace.batches) == 20
    assert len(trace.commands(do.WakeAt)) <= len(trace.launched) + 2


def test_a_checkpoint_never_holds_a_batch_that_is_still_being_shipped() -> None:
    setup = setup_for(lag=3, checkpoint_every=1, max_steps=8)
    script = Script(reward=alternating, seconds=lambda _r, _t: 0.1, ship_s=0.5, train_s=lambda _s: 2.0)
    world = World(setup, script, cap=16, watch=Invariants())
    trace = world.run()
    shipped = 0
    for _, event, commands in trace.journal:
        if isinstance(event, on.BatchShipped):
            shipped = event.step
        for command in commands:
            if isinstance(command, do.SaveCheckpoint):
                assert command.step == shipped
    assert len(trace.checkpoints) >= 2


def test_the_end_of_a_run_is_not_taken_for_a_streak_of_dead_groups() -> None:
    setup = setup_for(max_steps=1, dead_group_limit=2)
    script = Script(seconds=lambda r, _t: 1.0 if r.group < 2 else 60.0, reward=alternating)
    trace = World(setup, script, cap=32, watch=Invariants()).run()
    assert trace.finish is not None
    assert trace.finish.status == "done"


def test_nothing_is_commanded_after_the_last_command() -> None:
    world = World(setup_for(max_steps=2), Script(reward=alternating, train_s=lambda _s: 5.0), cap=4)
    world.at(2.0, world.shut_down)
    world.run()
    assert world.trace.finish is not None
    assert world.core.handle(on.PolicyPublished(1, "weights/v1"), 99.0) == []


def test_the_trainers_word_may_overtake_the_report_of_the_shipment() -> None:
    world = World(setup_for(max_steps=2), Script(reward=alternating, ship_s=5.0), cap=4)
    world.run(until=1.5)
    assert world.core.cut == 1
    world.post(on.StepTrained(1, {}))
    assert world.core.trained == 1
    with pytest.raises(TrainerError, match="step 2"):
        world.post(on.StepTrained(2, {}))


@pytest.mark.parametrize("version", [0, 5])
def test_weights_that_no_batch_of_this_run_made_end_it(version: int) -> None:
    world = World(setup_for(), Script(), cap=4)
    world.run(until=0.5)
    with pytest.raises(TrainerError, match=f"v{version}"):
        world.post(on.PolicyPublished(version, "elsewhere"))


def test_the_run_ends_when_its_last_engine_is_lost() -> None:
    world = World(setup_for(), Script(), cap=4, engines=1)
    world.run(until=0.5)
    world.at(0.6, lambda: world.lose("e0"))
    with pytest.raises(EngineError, match="e0: connection refused"):
        world.run()


def test_an_event_that_contradicts_the_books_is_an_invariant_error() -> None:
    world = World(setup_for(), Script(), cap=4)
    world.run(until=0.5)
    ended = next(iter(world.running.values()))
    with pytest.raises(InvariantError, match="still running"):
        world._end(ended, Outcome("completed"))


@FAST
@given(st.integers(0, 10**6))
def test_a_run_in_which_everything_fails_ends_with_the_counts(seed: int) -> None:
    setup = setup_for(dead_group_limit=6, max_steps=100, seed=seed)
    world = World(setup, replace(chaos(seed), reward=lambda *_: 0.0, plan=None), cap=4, watch=Invariants())
    with pytest.raises(NoProgressError, match="7 groups in a row"):
        world.run()
