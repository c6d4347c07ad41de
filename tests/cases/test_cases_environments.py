"""Cases about environments' limits: whole groups against the cap, rollouts of one environment at once, the mix."""

from __future__ import annotations

import msgspec
import pytest

from paceline.config import EvalSection
from paceline.core.admission import FixedCap
from paceline.core.setup import CoreSetup, TrainSpec
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.rollout import Outcome
from paceline.testing import Invariants, Plan, Script, Trace, World, setup_for, train_env

LOST = Outcome("failed", "infrastructure", "sandbox lost")


def whole(setup: CoreSetup, *where: tuple[str, str]) -> CoreSetup:
    return msgspec.structs.replace(setup, whole_groups=frozenset(where))


def in_flight(world: Trace) -> list[tuple[float, dict[int, int]]]:
    """(seconds, rollouts in flight by group) after each event."""
    running: dict[int, int] = {}
    seen = []
    for at, event, commands in world.journal:
        if isinstance(event, on.RolloutEnded):
            running[event.rollout.id.group] -= 1
        for command in commands:
            if isinstance(command, do.StartRollout):
                running[command.rollout.group] = running.get(command.rollout.group, 0) + 1
        seen.append((at, {group: n for group, n in running.items() if n}))
    return seen


@pytest.mark.parametrize("size", [3, 4, 6])
def test_s07_a_group_that_runs_whole_starts_with_all_its_members_or_waits(size: int) -> None:
    setup = whole(setup_for(train_env(group_size=size), batch=size, max_steps=4), ("train", "env"))
    world = World(setup, Script(seconds=lambda r, _t: 1.0 + r.member), cap=4).run()
    assert world.finish is not None
    assert world.finish.status == "done"
    begun: set[int] = set()
    for _, groups in in_flight(world):
        for group, members in groups.items():
            if group not in begun:
                begun.add(group)
                assert members == size  # all of them at once
        if size > 4:
            assert len(groups) <= 1  # larger than all permits together: alone
        else:
            assert sum(groups.values()) <= 4


def test_s07_it_is_not_starved_by_small_ones_nor_are_they_by_it() -> None:
    envs = train_env("whole", group_size=4), train_env("small", group_size=1)
    setup = whole(setup_for(*envs, batch=8, max_steps=6), ("train", "whole"))
    world = World(setup, Script(seconds=lambda r, _t: 1.0 + r.group % 3), cap=5).run()
    started = [c.task.env for c in world.launched]
    assert started.count("whole") >= 12
    assert started.count("small") >= 3


def test_s07_an_eval_that_runs_whole_and_is_larger_than_the_cap_is_measured() -> None:
    held = EvalSection(id="held", examples=2, k=6, every=100)
    setup = whole(setup_for(batch=4, max_steps=2, evals=[held]), ("eval", "held"))
    world = World(setup, Script(), cap=4).run()
    assert {report.rollouts for report in world.evals} == {12}


class Falls(FixedCap):
    """A cap that falls below a whole group once that many rollouts have been started."""

    def __init__(self, most: int, least: int, after: int) -> None:
        super().__init__(most)
        self.least, self.after, self.started = least, after, 0

    def fall(self, world: object, event: object, commands: list[do.Command]) -> None:
        self.started += sum(isinstance(command, do.StartRollout) for command in commands)
        if self.started >= self.after:
            self._cap = self.least


def test_s07_a_cap_that_falls_below_a_whole_group_during_the_run_stops_neither_training_nor_evals() -> None:
    held = EvalSection(id="held", examples=2, k=6, every=2)
    spec = train_env(group_size=6)
    setup = whole(setup_for(spec, batch=6, max_steps=6, evals=[held]), ("train", "env"), ("eval", "held"))
    falls = Falls(14, 4, after=18)
    world = World(setup, Script(), admission=falls, watch=falls.fall).run()
    assert world.finish is not None
    assert world.finish.status == "done"
    assert len(world.batches) == 6
    assert [(report.version, report.rollouts) for report in world.evals] == [(n, 12) for n in (0, 2, 4, 6)]
    after = in_flight(world)[-1][0]
    groups = [running for at, running in in_flight(world) if running and at > after / 2]
    assert groups
    assert all(list(running.values()) <= [6] for running in groups)  # each alone, and whole


def by_attempt(world: Trace) -> dict[int, dict[int, int]]:
    """Members started, by group and attempt."""
    started: dict[int, dict[int, int]] = {}
    for command in world.launched:
        attempts = started.setdefault(command.rollout.group, {})
        attempts[command.rollout.attempt] = attempts.get(command.rollout.attempt, 0) + 1
    return started


def test_a_whole_group_that_loses_a_member_is_tried_again_as_a_whole_and_only_so_often() -> None:
    setup = whole(setup_for(train_env(group_size=3, max_attempts=3), batch=6, max_steps=3), ("train", "env"))

    def plan(rollout: object, task: object) -> Plan:
        group, member, attempt = rollout  # type: ignore[misc]
        lost = member == 1 and (group == 0 or (group == 2 and attempt == 0))
        return Plan(outcome=LOST) if lost else Plan(reward=float(member))

    driven = World(setup, Script(plan=plan), cap=5, watch=Invariants())
    world = driven.run()
    started = by_attempt(world)
    assert started[0] == {0: 3, 1: 3, 2: 3}  # at most three attempts, of all its members
    assert started[1] == {0: 3}
    assert started[2] == {0: 3, 1: 3}
    for _, groups in in_flight(world):  # and none of them alone
        assert all(members in (1, 2, 3) for members in groups.values())
    for _, _, commands in world.journal:
        begun = [c.rollout for c in commands if isinstance(c, do.StartRollout)]
        assert len({r[::2] for r in begun}) * 3 == len(begun)
    retried = [c for _, _, commands in world.journal for c in commands if isinstance(c, do.NoteRetry)]
    assert len(retried) == 9
    assert {"infrastructure (member 1)" in c.reason for c in retried} == {True}
    shipped = {sample.rollout for batch in world.batches for sample in batch.samples}
    assert {r.attempt for r in shipped if r.group == 2} == {1}
    driven.core.account.check()
    # What was tried again, and the member of group 0 that was lost for good.
    assert driven.core.account.of("train", "env").rollouts["failed"] == 9 + 1


def test_a_whole_group_that_the_run_itself_cut_short_is_not_tried_again() -> None:
    setup = whole(setup_for(train_env(group_size=2, max_attempts=3), batch=2, max_steps=1), ("train", "env"))

    def plan(rollout: object, task: object) -> Plan:
        group, member, _ = rollout  # type: ignore[misc]
        if group == 1:
            outcome = LOST if member else Outcome("cancelled", "stale", "too old")
            return Plan(outcome=outcome)
        return Plan(reward=float(member), turns=((0.0, 9.0),))

    world = World(setup, Script(plan=plan), cap=4).run()
    assert by_attempt(world)[1] == {0: 2}


def limited(spec: TrainSpec, most: int) -> TrainSpec:
    return msgspec.structs.replace(spec, max_concurrent=most)


def test_rollouts_of_one_environment_at_once_are_limited_and_the_others_go_on() -> None:
    envs = limited(train_env("few", group_size=4), 3), train_env("many", group_size=4)
    world = World(setup_for(*envs, batch=16, max_steps=4), Script(), cap=12, watch=Invariants()).run()
    running = {"few": 0, "many": 0}
    most = dict(running)
    of = {}
    for _, event, commands in world.journal:
        if isinstance(event, on.RolloutEnded):
            running[of[event.rollout.id]] -= 1
        for command in commands:
            if isinstance(command, do.StartRollout):
                of[command.rollout] = command.task.env
                running[command.task.env] += 1
                most[command.task.env] = max(most[command.task.env], running[command.task.env])
    assert most["few"] == 3
    assert most["many"] > 6
    assert world.finish is not None
    assert world.finish.status == "done"


def test_s13_what_is_trained_has_the_shares_asked_for_through_the_core() -> None:
    envs = train_env("a", group_size=2), train_env("b", group_size=2)
    setup = msgspec.structs.replace(setup_for(*envs, batch=16, max_steps=60), mix_by="rollouts")

    def plan(rollout: object, task: object) -> Plan:
        group, member, _ = rollout  # type: ignore[misc]
        dead = task.env == "a" and group % 5 < 3  # type: ignore[attr-defined]
        return Plan(turns=((0.0, 4.0 if task.env == "a" else 1.0),), reward=0.0 if dead else float(member))  # type: ignore[attr-defined]

    world = World(setup, Script(plan=plan), cap=24, watch=Invariants()).run()
    shipped = [sample.env for batch in world.batches for sample in batch.samples]
    later = shipped[len(shipped) // 4 :]
    assert later.count("a") / len(later) == pytest.approx(0.5, abs=0.06)
