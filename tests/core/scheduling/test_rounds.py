"""What defines `synchronous` and `overprovision`."""

from __future__ import annotations

import pytest
from policies import POLICIES, setup_of

from paceline.core.scheduling import Overprovision
from paceline.core.staleness import staleness
from paceline.domain import commands as do
from paceline.domain.batch import Batch
from paceline.testing import Invariants, Script, Trace, World, alternating


def run(name: str, script: Script, **more: object) -> tuple[World, Trace]:
    kind = POLICIES[name]
    setup = setup_of(kind, batch=8, **more)
    world = World(setup, script, cap=64, scheduling=kind.make(), watch=Invariants())
    return world, world.run()


def one_slow(rollout: object, task: object) -> float:
    """Member 0 of each group takes ten times as long."""
    return 10.0 if rollout.member == 0 else 1.0  # type: ignore[attr-defined]


SCRIPT = Script(seconds=one_slow, reward=alternating)


def lateness(batch: Batch) -> list[int]:
    return [staleness(sample.oldest_version, batch.step) for sample in batch.samples]


def test_synchronous_waits_for_the_slowest_and_starts_nothing_meanwhile() -> None:
    _world, trace = run("synchronous", SCRIPT, max_steps=3)
    assert trace.shipped_at == [10.0, 21.0, 32.0]  # 10 s of rollouts, 1 s of training
    assert [late for batch in trace.batches for late in lateness(batch)] == [0] * 24
    assert len(trace.launched) == 24


@pytest.mark.parametrize("name", ["synchronous", "overprovision_discard"])
def test_on_policy_rounds_begin_only_with_the_weights_of_their_step(name: str) -> None:
    _world, trace = run(name, SCRIPT, max_steps=4)
    cut = 0
    for _, _, commands in trace.journal:
        for command in commands:
            if isinstance(command, do.StartRollout):
                assert command.version == cut
            cut += isinstance(command, do.ShipBatch)
    assert all(late == 0 for batch in trace.batches for late in lateness(batch))


def test_a_batch_of_synchronous_takes_all_that_its_round_brought() -> None:
    kind = POLICIES["synchronous"]
    setup = setup_of(kind, batch=6, max_steps=3)  # groups of 4
    trace = World(setup, SCRIPT, cap=64, scheduling=kind.make(), watch=Invariants()).run()
    assert [len(batch.rollouts) for batch in trace.batches] == [8, 8, 8]


def test_overprovision_starts_its_factor_and_keeps_what_is_late() -> None:
    world, trace = run("overprovision_keep", SCRIPT, max_steps=3)
    before = [c for at, _, cs in trace.journal if at < 5 for c in cs if isinstance(c, do.StartRollout)]
    assert len(before) == 12
    assert not world.core.account.of("train", "env").rollouts.get("discarded")
    shipped = {rollout for batch in trace.batches for rollout in batch.rollouts}
    # Groups close in the order of their slowest: nobody is passed over.
    assert [r for r in sorted(shipped) if r.group < 6] == [(g, m, 0) for g in range(6) for m in range(4)]


def slow_groups(rollout: object, task: object) -> float:
    return 30.0 if task.index % 3 == 0 else 1.0  # type: ignore[attr-defined]


def test_keeping_trains_the_late_in_a_later_batch_and_discarding_never() -> None:
    script = Script(seconds=slow_groups, reward=alternating, train_s=lambda _: 5.0)
    seen = {}
    for late in ("keep", "discard"):
        kind = POLICIES[f"overprovision_{late}"]
        setup = setup_of(kind, batch=8, max_steps=20)
        world = World(setup, script, cap=64, scheduling=Overprovision(1.5, late), watch=Invariants())
        trace = world.run()
        seen[late] = [r for batch in trace.batches for r in batch.rollouts if r.group % 3 == 0]
        account = world.core.account.of("train", "env")
        assert bool(account.rollouts.get("discarded")) == (late == "discard")
    assert seen["keep"]
    assert not seen["discard"]


def test_what_a_discarding_round_throws_away_is_counted_by_name() -> None:
    world, trace = run("overprovision_discard", Script(seconds=slow_groups, reward=alternating), max_steps=5)
    account = world.core.account.of("train", "env")
    causes = [c.cause for _, _, cs in trace.journal for c in cs if isinstance(c, do.CancelRollout)]
    assert causes.count("discarded") == account.rollouts["discarded"] > 0
    assert account.tokens["discarded"] > 0
