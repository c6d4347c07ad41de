"""A run is rebuilt from its journal as it was: nothing is decided again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.config import EvalSection
from paceline.core.admission import FixedCap
from paceline.core.advantages import builtin
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome, Rollout
from paceline.domain.task import TaskRef
from paceline.journal.lines import Line, Restorer, line_of
from paceline.testing import Invariants, Plan, Script, World, alternating, chaos, setup_for, train_env
from paceline.testing.policies import ALL_POLICIES as POLICIES


def wild(seed: int, **options: Any) -> World:
    setup = setup_for(
        train_env("a", tasks=30, max_attempts=3, group_size=3, on_stale="mask_tokens"),
        train_env("b", max_attempts=2, weight=2.0, tasks_per_minute=120.0),
        batch=None if seed % 2 else 6,
        batch_tokens=150 if seed % 2 else None,
        lag=1 + seed % 3,
        max_staleness=seed % 3,
        max_steps=12,
        seed=seed,
        checkpoint_every=3,
        evals=[EvalSection(id="e", name="held", examples=2, k=2, every=3)],
    )
    if seed % 3 == 2:  # one of the two runs its groups in one call
        setup = msgspec.structs.replace(setup, whole_groups=frozenset({("train", "a")}))
    return World(setup, chaos(seed), engines=2, cap=7, **options)


def as_read(journal: list[Any]) -> list[Any]:
    """The records as they come back from the log: without arrays."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Line)
    restorer = Restorer()
    found = []
    for seq, (at, event, commands) in enumerate(journal):
        line = decoder.decode(
            encoder.encode([seq, at, line_of(event), [line_of(command) for command in commands]])
        )
        restored = restorer.event(line.event)
        found.append((seq, at, restored, [restorer.command(command) for command in line.commands]))
    return found


def normal(state: dict[str, Any]) -> dict[str, Any]:
    """Without what a fold is not meant to know, and with nothing that depends on the order of keys."""
    plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False)
    # Evals take group numbers before they start, and a number that nobody has seen may be given again.
    for name in ("admission", "placement", "shipping", "next_group"):
        plain.pop(name, None)
    plain["plan"] = {env: version for env, version in plain["plan"].items() if version >= 0}
    curriculum = plain["curriculum"]
    # What a mix and a sampler have learnt is that of the newest checkpoint, like what admission has.
    for name in ("mix", "learnt", "gates", "resting"):
        curriculum.pop(name, None)
    # So is what tasks have cost before they were too much.
    held = curriculum.pop("quarantine", {}).get("held", {})
    curriculum["held"] = {env: indices for env, indices in held.items() if indices}
    curriculum["envs"] = {
        env: (saved["drawn"], saved["redraw"])
        for env, saved in curriculum["envs"].items()
        if saved["drawn"] or saved["redraw"]
    }
    plain["account"] = sorted(
        [split, env, launched, sampled, *({k: v for k, v in places.items() if v} for places in rest)]
        for split, env, launched, sampled, *rest in plain["account"]
        if launched
    )
    return plain


@pytest.mark.parametrize("seed", range(24))
def test_the_fold_over_the_journal_is_the_core_at_every_record(seed: int) -> None:
    snapshots: list[dict[str, Any] | None] = []

    def watch(world: World, event: Any, commands: Any) -> None:
        draining = world.core._draining is not None
        sparse = len(snapshots) % 7 and len(snapshots) > 40
        snapshots.append(None if draining or sparse else normal(world.core.snapshot()))

    world = wild(seed, watch=watch)
    world.at(25.0, lambda: world.lose("e0"))
    trace = world.run(events=1500)
    rollouts: dict[RolloutId, Rollout] = {rollout.id: rollout for rollout in trace.ended}

    recovery = Recovery(EMPTY)
    compared = 0
    for seq, at, event, commands in as_read(trace.journal):
        recovery.apply(seq, at, event, commands)
        if (expected := snapshots[seq]) is not None:
            compared += 1
            assert recovery.wanted() <= set(rollouts)
            assert normal(recovery.state(rollouts, {})) == expected, f"after record {seq}"
    assert compared > 50


@pytest.mark.parametrize("name", POLICIES)
def test_the_fold_is_the_core_under_every_scheduling_policy(name: str) -> None:
    kind = POLICIES[name]
    setup = setup_for(
        train_env("a", tasks=30, max_attempts=3, group_size=3),
        train_env("b", max_attempts=2, weight=2.0),
        batch=6,
        lag=kind.lag,
        max_staleness=kind.max_staleness,
        max_steps=8,
        seed=1,
        checkpoint_every=3,
    )

    def told(state: dict[str, Any]) -> dict[str, Any]:
        """Without what a policy has learnt, which is that of the newest checkpoint, and the places of what it holds: nothing is
        held in the next life, until it asks for its turn."""
        plain = normal(state)
        del plain["scheduling"]
        for group in (*plain["groups"], *plain["processing"]):
            del group["fallback"]
            if name == "unbiased_resume":
                del group["places"]
        return plain

    snapshots: list[dict[str, Any] | None] = []

    def watch(world: World, event: Any, commands: Any) -> None:
        skip = world.core._draining is not None or (len(snapshots) % 5 and len(snapshots) > 40)
        snapshots.append(None if skip else told(world.core.snapshot()))

    world = World(
        setup,
        chaos(1),
        engines=2,
        cap=7,
        scheduling=kind.make(),
        algorithm=builtin(kind.algorithm, {}),
        watch=watch,
    )
    trace = world.run(events=900)
    rollouts = {rollout.id: rollout for rollout in trace.ended}
    recovery, compared = Recovery(EMPTY), 0
    for seq, at, event, commands in as_read(trace.journal):
        recovery.apply(seq, at, event, commands)
        if (expected := snapshots[seq]) is not None:
            compared += 1
            assert told(recovery.state(rollouts, {})) == expected, f"after record {seq}"
    assert compared > 50

    for state in (recovery.state(rollouts, {}), world.core.snapshot()):
        core = Core(setup, FixedCap(7), kind.make())
        core.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False), 0, "", rollouts)
        for group in core.groups.groups():
            late = sum(member.outcome.cause == "deferred" for member in group.arrived)
            whole = group.size - group.closed_unlaunched - group.left - late
            assert group.places == (whole if group.needs == group.size else group.places)


@pytest.mark.parametrize("from_checkpoint", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_the_end_of_the_orchestrator_costs_a_member_none_of_its_attempts(
    whole: bool, from_checkpoint: bool
) -> None:
    def plan(rollout: RolloutId, task: Any) -> Plan:
        """The first two attempts are cut off by kills, behind a first answer; the next fails, the one after it ends well."""
        if rollout.attempt < 2:
            return Plan(((0.0, 1.0), (0.0, 1000.0)))
        return (
            Plan(outcome=Outcome("failed", "infrastructure", "no sandbox"))
            if rollout.attempt == 2
            else Plan()
        )

    setup = setup_for(train_env(group_size=2, max_attempts=2), batch=2, max_steps=1)
    if whole:
        setup = msgspec.structs.replace(setup, whole_groups=frozenset({("train", "env")}))
    world = World(setup, Script(plan=plan, reward=alternating), cap=2)
    journal: list[Any] = []
    rollouts: dict[RolloutId, Rollout] = {}
    for kill in (5.0, 10.0):
        world.run(until=kill)
        journal += world.trace.journal
        rollouts |= {rollout.id: rollout for rollout in world.trace.ended}
        recovery = Recovery(EMPTY)
        if from_checkpoint:
            recovery = Recovery(
                msgspec.msgpack.decode(msgspec.msgpack.encode(world.core.snapshot()), strict=False)
            )
        else:
            for seq, at, event, commands in as_read(journal):
                recovery.apply(seq, at, event, commands)
        world = World(
            setup,
            world.script,
            cap=2,
            recovery=recovery,
            rollouts=rollouts,
            parts={
                left.id: [p for p in world.trace.parts if p.rollout == left.id] for left in recovery.under_way
            },
            first_seq=len(journal),
            now=kill,
            watch=Invariants(),
        )
    world.run(until=100.0)
    ended = {rollout.id: rollout.outcome.ending for rollout in world.trace.ended if rollout.id.group == 0}
    assert ended == {
        RolloutId(0, member, attempt): ending
        for member in (0, 1)
        for attempt, ending in ((1, "failed"), (2, "failed"), (3, "completed"))
    }


def test_a_task_begins_again_though_its_environment_is_not_in_the_checkpoint() -> None:
    recovery = Recovery(EMPTY)
    recovery.apply(0, 0.0, on.TimerFired(), (do.NoteRedraw(TaskRef("a", "train", 3, 1)),))
    assert recovery.state({}, {})["curriculum"]["envs"]["a"]["redraw"] == [(3, 1)]
