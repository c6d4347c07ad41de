"""Gates: what a group must pass to train, which tasks rest, and both after a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from paceline.config import EnvSection
from paceline.core.gates import AdvantageRange, Gate, Gates, Judgement, Outcome, RewardBand, SolvedRests
from paceline.core.scheduling import Overprovision
from paceline.core.setup import train_spec
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.errors import ConfigError, NoProgressError
from paceline.testing import Invariants, Plan, Script, Trace, World, setup_for, train_env


def outcome(mean: float | None, *advantages: float, task: int = 0) -> Outcome:
    return Outcome(task, mean, None, advantages)


@pytest.mark.parametrize(
    ("gate", "seen", "refuses"),
    [
        (AdvantageRange(9, 0), outcome(0.5, 0.0, 0.0), "0"),
        (AdvantageRange(9, 0), outcome(0.5, 0.0, 0.1), ""),
        (AdvantageRange(9, 0), outcome(0.5), ""),
        (AdvantageRange(9, 0, low=-0.2, high=0.2), outcome(0.5, -0.1, 0.2), "-0.1"),
        (RewardBand(9, 0, low=0.2, high=0.8), outcome(0.9, 1.0), "0.9"),
        (RewardBand(9, 0, low=0.2, high=0.8), outcome(0.2, 1.0), ""),
        (RewardBand(9, 0, low=0.2, high=0.8), outcome(None), ""),
    ],
)
def test_a_gate_refuses_what_it_is_for_and_says_why(gate: Gate, seen: Outcome, refuses: str) -> None:
    said = gate.judge(seen).refuses
    assert bool(said) == bool(refuses)
    assert refuses in said


def test_a_solved_task_rests_when_it_was_solved_so_often_in_a_row() -> None:
    gate = SolvedRests(10, 0, times=2, epochs=3.0)
    assert [gate.judge(outcome(mean)).rests for mean in (1.0, 0.5, 1.0, 1.0, 1.0, None, 1.0)] == [
        *(0, 0, 0, 30, 0, 0, 30),
    ]
    assert gate.judge(outcome(1.0, task=3)).rests == 0
    again = SolvedRests(10, 0, times=2, epochs=3.0)
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(gate.snapshot())))
    assert again.judge(outcome(1.0, task=3)).rests == 30


class Every(Gate):
    """Refuses every so many-th group: a user's own, with a state."""

    def __init__(self, size: int | None, seed: int, *, nth: int) -> None:
        self.nth, self.seen = nth, 0

    def judge(self, outcome: Outcome) -> Judgement:
        self.seen += 1
        return Judgement("its turn" if self.seen % self.nth == 0 else "")

    def snapshot(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def gated(gate: Gate, **options: Any) -> World:
    spec = msgspec.structs.replace(train_env(group_size=2, tasks=12), gates=lambda: Gates({"g": gate}))

    def plan(rollout: object, task: object) -> Plan:
        _, member, _ = rollout  # type: ignore[misc]
        return Plan(reward=float(member))

    setup = setup_for(spec, batch=4, max_steps=8, **options)
    return World(setup, Script(plan=plan), cap=6, watch=Invariants())


def refused(trace: Trace) -> set[int]:
    return {
        command.rollout.group
        for _, _, commands in trace.journal
        for command in commands
        if isinstance(command, do.NoteDiscarded)
    }


def test_what_a_gate_refuses_does_not_train_is_told_with_its_name_and_leaves_its_place() -> None:
    world = gated(Every(None, 0, nth=3))
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    shipped = {sample.rollout.group for batch in trace.batches for sample in batch.samples}
    assert len(shipped) == 16  # as many batches as without the gate
    assert refused(trace)
    assert not shipped & refused(trace)
    reasons = {c.reason for _, _, cs in trace.journal for c in cs if isinstance(c, do.NoteDiscarded)}
    assert reasons == {"gate g: its turn"}
    world.core.account.check()
    assert world.core.account.of("train", "env").rollouts["discarded"] == 2 * len(refused(trace))


def test_a_gate_that_refuses_everything_ends_the_run_and_is_named() -> None:
    with pytest.raises(NoProgressError, match=r"gate g: its turn.*loosen the gate"):
        gated(Every(None, 0, nth=1), dead_group_limit=10).run()


def test_a_group_that_is_refused_and_late_for_its_round_is_thrown_away_once() -> None:
    spec = msgspec.structs.replace(
        train_env(group_size=2, tasks=12), gates=lambda: Gates({"g": Every(None, 0, nth=2)})
    )
    script = Script(
        plan=lambda rollout, _task: Plan(reward=float(rollout.member)),
        process_s=lambda group: 3.0 * (group % 3),
    )
    setup = setup_for(spec, batch=4, max_steps=8, lag=0, max_staleness=0)
    world = World(setup, script, cap=16, scheduling=Overprovision(2.0, "discard"), watch=Invariants())
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    reasons = {c.reason.partition(":")[0] for c in trace.commands(do.NoteDiscarded)}
    assert {"gate g", "late"} <= reasons
    thrown = Counter(c.rollout for c in trace.commands(do.NoteDiscarded))
    assert set(thrown.values()) == {1}


class Rests(Gate):
    """Lets task 3 rest for ever once it was seen."""

    def __init__(self) -> None: ...

    def judge(self, outcome: Outcome) -> Judgement:
        return Judgement(rests=10**6 if outcome.task == 3 else 0)

    def snapshot(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def drawn(trace: Trace) -> Counter[int]:
    return Counter(c.task.index for c in trace.launched if c.rollout.member == 0)


def test_a_task_at_rest_is_passed_over_also_after_a_restart_and_a_source_never_runs_dry() -> None:
    world = gated(Rests(), checkpoint_every=4)
    trace = world.run()
    counts = drawn(trace)
    assert counts[3] <= 2  # once, or once more before the first was processed
    assert min(counts[task] for task in range(12) if task != 3) >= 1
    step, state = trace.checkpoints[0]
    again = gated(Rests())
    again.core.restore(state, step)
    assert (
        again.core.curriculum.samplers["env"].resting == world.core.curriculum.samplers["env"].resting != {}
    )
    for sampler in again.core.curriculum.samplers.values():
        sampler.resting = dict.fromkeys(range(12), 10**9)
        assert sampler.draw().index in range(12)
        assert sampler.drawn < 200


def test_what_a_gate_has_learnt_is_in_the_checkpoint() -> None:
    world = gated(Every(None, 0, nth=3), checkpoint_every=4)
    trace = world.run()
    _, state = trace.checkpoints[0]
    gate = Every(None, 0, nth=3)
    gated(gate).core.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False), 0)
    before = [e for _, e, _ in trace.journal[: state["seq"]] if isinstance(e, on.GroupProcessed)]
    assert gate.seen == len(before) > 0


def test_gates_are_made_from_the_config_and_what_does_not_fit_is_named() -> None:
    def made(*gates: dict[str, Any], size: int | None = 9) -> Any:
        section = EnvSection.model_validate({"id": "e", "gates": gates})
        spec = train_spec(section, size, "", gates={"own:Every": Every})
        assert spec.gates is not None
        return spec.gates()

    both = made(
        {"id": "reward", "args": {"low": 0.5}}, {"id": "own:Every", "name": "third", "args": {"nth": 1}}
    )
    assert both.judge(outcome(0.2)).refuses == "gate reward: mean reward 0.2, not from 0.5 to 1"
    assert both.judge(outcome(0.7)).refuses == "gate third: its turn"
    for gates, size, says in (
        ([{"id": "rewards"}], 9, "expected one of advantage, reward, solved"),
        ([{"id": "reward"}, {"id": "reward"}], 9, "two gates are called 'reward'"),
        ([{"id": "reward", "args": {"least": 1}}], 9, "gate 'reward' refuses its args.*least"),
        ([{"id": "reward", "args": {"low": 2}}], 9, "low is below high"),
        ([{"id": "solved"}], None, "endless source"),
    ):
        with pytest.raises((ConfigError, ValueError), match=says):
            made(*gates, size=size)
