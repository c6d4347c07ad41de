"""What defines `partial`, `tail_rounds` and `unbiased_tail`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest
from policies import Kind, setup_of

from paceline.core.advantages import builtin
from paceline.core.scheduling import Partial, Scheduling, TailRounds, UnbiasedTail
from paceline.core.staleness import staleness
from paceline.core.streams import key, uniform
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome
from paceline.domain.task import TaskRef
from paceline.observe.run import RunFolds
from paceline.testing import Invariants, Plan, Script, World, setup_for, train_env
from paceline.testing.lives import Record, check_records
from paceline.testing.policies import POLICIES
from paceline.testing.storm import Storm


def length(noise: int) -> int:
    """A response's length depends on its noise alone: 2 to 8 tokens, and one in eight takes 40."""
    return 40 if uniform(noise, 0) < 0.125 else 2 + int(7 * uniform(noise, 2))


class PinnedWorld(World):
    """What a rollout does depends on the noise that it is started with, as with an engine whose noise is pinned."""

    def __init__(self, noise: dict[RolloutId, int], *args: Any, **more: Any) -> None:
        self.noise = noise
        self.folds = RunFolds()
        super().__init__(*args, **more)

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        self.noise[command.rollout] = command.noise_seed
        super()._do_StartRollout(command)

    def _call_ended(self, running: Any, tokens: int, finish: Any, **more: Any) -> None:
        if finish == "abort":  # as much as there was time for
            tokens = int(self.now - running.calling[1])
        super()._call_ended(running, tokens, finish, **more)

    def _segment_ended(self, running: Any, tokens: int, finish: Any) -> None:
        if finish == "abort":
            tokens = int(self.now - running.calling[1])
        super()._segment_ended(running, tokens, finish)


def run(policy: Scheduling, *, max_staleness: int = 0, steps: int = 20) -> PinnedWorld:
    invariants = Invariants()

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        invariants(world, event, commands)
        assert isinstance(world, PinnedWorld)
        world.folds.apply(world.now, event, commands)

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        seed = noise[rollout]
        tokens = length(seed)
        return Plan(((0.0, float(tokens)),), tokens, reward=uniform(seed, 1))

    setup = setup_of(
        Kind(lambda: policy, max_staleness=max_staleness),
        envs=(train_env(group_size=4),),
        batch=24,
        max_steps=steps,
        seq_len=512,
    )
    noise: dict[RolloutId, int] = {}
    script = Script(plan=plan, train_s=lambda _: 2.0)
    rloo = builtin("rloo", {})
    world = PinnedWorld(noise, setup, script, cap=256, scheduling=policy, watch=watch, algorithm=rloo)
    trace = world.run(events=400_000)
    assert trace.finish is not None
    assert trace.finish.status == "done"
    return world


def shipped_lengths(world: PinnedWorld) -> list[int]:
    return [s.trainable_tokens for batch in world.trace.batches for s in batch.samples]


def bias(world: PinnedWorld) -> float:
    ratio: float = world.folds.lengths.bias()[0].ratio
    return ratio - 1


def late(world: PinnedWorld) -> list[int]:
    return [staleness(s.oldest_version, b.step) for b in world.trace.batches for s in b.samples]


# ── partial ──


def test_a_budget_cuts_at_its_tokens_and_the_rest_goes_on_in_the_next_round() -> None:
    world = run(Partial(8, 1.0), max_staleness=8)
    grants = [c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.GrantTurn)]
    assert max(g.max_tokens or 0 for g in grants) == 8
    versions = {len(s.versions) for b in world.trace.batches for s in b.samples if s.trainable_tokens == 40}
    assert max(versions) >= 3
    assert not world.core.account.of("train", "env").rollouts.get("discarded")
    assert 0 < max(late(world)) <= 8
    # A round lasts as long as its budget, or a few of them, and not as long as the longest.
    times = world.trace.shipped_at
    assert (times[-1] - times[4]) / (len(times) - 5) < 20


def test_over_issue_aborts_when_the_batch_is_full_and_goes_on_with_what_it_kept() -> None:
    world = run(Partial(None, 2.0), max_staleness=8)
    held = Counter(c.rollout for c in world.trace.parked)
    ended = {r.id: r for r in world.trace.ended}
    assert held
    assert all(ended[r].outcome.ending == "completed" for r in held if ended[r].outcome.cause != "surplus")
    assert abs(bias(world)) < 0.08


# ── tail_rounds ──


def test_short_rounds_race_and_losers_are_run_anew_in_a_long_round() -> None:
    policy = TailRounds(1.25, 1.25)
    world = run(policy)
    puts = [c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.PutOff)]
    starts = [c for c in world.trace.launched if c.put_off]
    assert {c.put_off for c in starts} <= {p.number for p in puts}
    assert puts
    assert starts
    assert all(p.noise == () and p.size == 4 for p in puts)
    by_group = Counter(c.rollout.group for c in world.trace.launched if not c.put_off)
    assert set(by_group.values()) == {5}  # 1.25 times 4
    for result in world.trace.results.values():
        trained = [v for v in result.verdicts if v.fate in ("queued", "shipped", "zero_signal")]
        assert len(trained) <= 5
    assert set(late(world)) == {0}
    assert world.core.account.of("train", "env").tokens["discarded"] > 0


def test_the_race_trains_on_shorter_rollouts_and_the_run_says_so() -> None:
    world = run(TailRounds(1.25, 1.25))
    assert bias(world) < -0.10
    true = sum(length(seed) for seed in world.noise.values()) / len(world.noise)
    drawn = world.folds.lengths.bias()[0].drawn_mean
    assert drawn == pytest.approx(true, rel=0.12)  # although most of the long ones were cut off


# ── unbiased_tail ──


@pytest.mark.parametrize(("how", "bound"), [("pinned", 0), ("resume", 32)])
def test_what_is_beyond_the_cut_off_comes_back_and_nothing_is_skewed(how: str, bound: int) -> None:
    world = run(UnbiasedTail(9, how), max_staleness=bound, steps=32)  # type: ignore[arg-type]
    lengths = shipped_lengths(world)
    # What waits for its round when the run ends is all that is missing.
    kept = [t for put in world.core.launcher.kept.values() for t in map(length, put.noise)]
    held = [40 for r in world.trace.ended if r.outcome.cause == "surplus" and r.sampled_tokens >= 9]
    share = sum(t == 40 for t in [*lengths, *kept, *held]) / (len(lengths) + len(kept) + len(held))
    assert 0.095 < share < 0.155
    assert lengths.count(40) > 0.07 * len(lengths)
    assert (set(late(world)) == {0}) == (how == "pinned")


def test_a_pinned_response_comes_back_once_and_is_the_same() -> None:
    world = run(UnbiasedTail(9, "pinned"), steps=32)
    noise = world.noise
    puts = {c.number: c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.PutOff)}
    again = {p.again[c.rollout.member]: c for c in world.trace.launched if (p := puts.get(c.put_off))}
    assert again
    for first, second in again.items():
        assert noise[first] == second.noise_seed
        assert noise[first] == noise[second.rollout]
    deferred = [r for r in world.trace.ended if r.outcome.cause == "deferred"]
    assert all(r.sampled_tokens == 9 for r in deferred)
    assert all(length(noise[r.id]) > 9 for r in deferred)
    # No noise is trained twice, and what comes back is not cut again.
    shipped = [r for b in world.trace.batches for r in b.rollouts]
    assert len({noise[r] for r in shipped}) == len(shipped)
    account = world.core.account.of("train", "env")
    assert account.rollouts["deferred"] == sum(
        v.fate == "deferred" for result in world.trace.results.values() for v in result.verdicts
    )


def test_the_rest_of_a_group_is_compared_with_the_siblings_that_were_on_time() -> None:
    world = run(UnbiasedTail(9, "pinned"), steps=32)
    puts = {c.number: c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.PutOff)}
    rest = {c.rollout.group: puts[c.put_off] for c in world.trace.launched if c.put_off}
    ended = {r.id: r for r in world.trace.ended}
    seen = 0
    for group, put in rest.items():
        if group not in world.trace.results or not put.references:
            continue
        verdicts = world.trace.results[group].verdicts
        rewards = {
            v.rollout: ended[v.rollout].reward for v in verdicts if ended[v.rollout].reward is not None
        }
        for verdict in verdicts:
            if verdict.advantage is None:
                continue
            # With them alone: were it compared with the other late ones too, what it is compared with would depend on
            # its own lateness.
            expected = rewards[verdict.rollout] - sum(put.references) / len(put.references)
            assert verdict.advantage == pytest.approx(expected, abs=1e-6)
            seen += 1
    assert seen > 10


class NotedRounds(UnbiasedTail):
    """Notes of each batch whether its round was for the late, when its rollouts were started, and what then waits."""

    def __init__(self) -> None:
        super().__init__(9, "pinned")
        self.noted: list[tuple[bool, int]] = []

    def batch_cut(self) -> None:
        super().batch_cut()
        self.noted.append((self.is_late, sum(kept.size for kept in self.desk.kept.values())))


def test_a_round_starts_what_will_be_put_off_on_top_so_that_one_wave_fills_the_batch() -> None:
    policy = NotedRounds()
    world = run(policy, steps=60)
    times = {at for at, _, cs in world.trace.journal for c in cs if isinstance(c, do.StartRollout)}
    began, waves = 0.0, []
    for (was_late, _), cut in zip(policy.noted, world.trace.shipped_at, strict=True):
        if not was_late:
            waves.append(sum(began <= at < cut for at in times))
        began = cut
    known = waves[5:]  # the share that is put off must be seen before it can be reckoned with
    assert len(known) > 40
    assert sum(n > 1 for n in known) < 0.15 * len(known)
    # A few more than a batch then train, not many.
    sizes = [len(b.rollouts) for b in world.trace.batches]
    assert sum(sizes) / len(sizes) < 1.35 * 24


@pytest.mark.parametrize("how", ["pinned", "resume"])
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(("failures", "attempts"), [(0.0, 1), (0.2, 1), (0.2, 3)])
def test_a_finite_source_is_used_up_whatever_fails_and_however_batches_are_sized(
    how: Literal["pinned", "resume"], by_tokens: bool, failures: float, attempts: int
) -> None:
    for seed in range(8):

        def plan(rollout: RolloutId, task: TaskRef, seed: int = seed) -> Plan:
            chance = partial(uniform, key(seed, *rollout))
            tokens = int(1 + 30 * chance(0) ** 3)
            if chance(1) < failures:
                return Plan(((0.0, float(tokens)),), tokens, outcome=Outcome("failed", "infrastructure", "x"))
            # A fifth of the groups has no signal, more of the small ones.
            return Plan(((0.0, float(tokens)),), tokens, reward=max(0.0, chance(2) - 0.4))

        setup = setup_of(
            Kind(lambda: UnbiasedTail(None, how), max_staleness=0 if how == "pinned" else 64),
            envs=(
                train_env("a", tasks=20 + seed, epochs=1, group_size=1 + seed % 4, max_attempts=attempts),
                train_env("b", tasks=9, epochs=1, group_size=3, max_attempts=attempts),
            ),
            batch=4 + seed,
            batch_tokens=40 + 20 * seed if by_tokens else None,
            max_steps=10**6,
            seq_len=512,
            seed=seed,
            dead_group_limit=10**9,
        )
        policy = UnbiasedTail((3, 9, None)[seed % 3], how)
        rloo = builtin("rloo", {})
        world = World(
            setup,
            Script(plan=plan),
            cap=(4, 64)[seed % 2],
            scheduling=policy,
            watch=Invariants(),
            algorithm=rloo,
        )
        trace = world.run(events=100_000)
        assert trace.finish is not None, f"seed {seed} stands still"
        assert trace.finish.status == "done"


def test_the_round_of_the_late_is_for_all_of_them() -> None:
    policy = NotedRounds()
    run(policy, steps=60)
    after = [waiting for was_late, waiting in policy.noted if was_late]
    assert len(after) >= 4
    assert set(after) == {0}


def test_a_group_that_is_late_as_a_whole_comes_back_as_a_whole() -> None:
    world = run(UnbiasedTail(1, "pinned"), steps=12)  # nobody finishes within a token
    account = world.core.account.of("train", "env")
    assert account.rollouts["shipped"] == sum(len(b.rollouts) for b in world.trace.batches)
    puts = [c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.PutOff)]
    assert all(put.size == 4 and len(put.references) == 1 for put in puts)


def test_a_shutdown_begins_a_task_again_or_keeps_its_late_members_but_never_both() -> None:
    def plan(rollout: RolloutId, _task: TaskRef) -> Plan:
        return Plan(((0.0, 20.0 if rollout.member < 2 else 40.0),), 20, reward=float(rollout.member))

    setup = setup_for(
        train_env(tasks=4, epochs=1, group_size=4), batch=8, lag=0, max_staleness=0, max_steps=10, seq_len=512
    )
    world = World(
        setup,
        Script(plan=plan),
        cap=64,
        scheduling=UnbiasedTail(9, "pinned"),
        algorithm=builtin("rloo", {}),
    )
    world.at(12.0, world.shut_down)
    trace = world.run()
    assert [c.task.index for c in trace.commands(do.NoteRedraw)] == [0, 1]
    assert [r.outcome.cause for r in trace.ended if r.id.member < 2] == ["deferred"] * 4, (
        "two were late in each"
    )
    assert not trace.commands(do.PutOff)
    check_records([Record(at, event, tuple(commands)) for at, event, commands in trace.journal], world)


def test_a_round_that_ends_puts_off_no_group_twice_that_closes_because_of_it() -> None:
    storm = Storm(16, 60)
    kind = POLICIES["tail_rounds"]
    storm.policy = "tail_rounds"
    storm.setup = msgspec.structs.replace(
        storm.setup, lag=kind.lag, max_staleness=kind.max_staleness, whole_groups=frozenset()
    )
    storm.run()


def test_who_is_late_stays_so_over_kills_and_is_compared_with_those_on_time() -> None:
    crossed = settled = 0
    for seed in (0, 3, 4, 7, 8, 11):  # where kills meet many that are late
        storm = Storm(seed, 400)
        kind = POLICIES["unbiased_resume"]
        storm.policy = "unbiased_resume"
        storm.setup = msgspec.structs.replace(
            storm.setup, lag=kind.lag, max_staleness=kind.max_staleness, whole_groups=frozenset()
        )
        storm.run()  # `check_records`: whoever is late has references
        late: set[RolloutId] = set()
        went_on: set[RolloutId] = set()
        for record in storm.records:
            late.update(c.rollout for c in record.commands if isinstance(c, do.NoteLate))
            if isinstance(record.event, on.RunOpened):
                went_on |= late.intersection(record.event.continues)
            for command in record.commands:
                if isinstance(command, do.GrantTurn) and command.rollout in late:
                    assert command.max_tokens == storm.setup.segment_tokens, "it may be cut off again"
            if isinstance(record.event, on.RolloutEnded):
                rollout = record.event.rollout
                settled += rollout.id in went_on and rollout.outcome.ending == "completed"
        crossed += len(went_on)
    assert crossed > 20
    assert settled > 5


def test_a_learnt_cut_off_makes_rounds_short() -> None:
    slow = run(UnbiasedTail(None, "pinned"), steps=48)
    times = slow.trace.shipped_at
    seconds = [b - a - 2.0 for a, b in pairwise(times[20:])]
    assert sum(seconds) / len(seconds) < 22  # a whole batch takes 40, but once in twenty
    assert abs(bias(slow)) < 0.06
