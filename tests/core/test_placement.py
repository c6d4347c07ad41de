"""Where the members of a group go when the engine of the first is full: what waiting and prefilling cost."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.admission import AdaptiveCap, Admission, Bounds, FixedCap, PredictiveCap
from paceline.core.fleet import EngineState, Fleet
from paceline.core.groups import OpenGroup
from paceline.core.placement import ENOUGH, Placement
from paceline.core.recovery import Recovery
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain.events import EngineJoined, LoadReported
from paceline.domain.ids import GroupId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, World, setup_for, train_env
from paceline.testing.closed_loop import AgentPlan, ClosedLoop


def told(*, gap_s: float, token_s: float, prompt: int) -> Placement:
    """Permits come back on e0 every `gap_s`, and on e1 an uncached token takes `token_s`."""
    placement = Placement()
    placement.asked("env", prompt)
    for n in range(20):
        placement.freed("e0", n * gap_s)
        placement.answered("e1", prompt, 0, token_s * prompt, 0.0)
        placement.answered("e1", prompt, prompt - 1, 1e-6, 0.0)
    return placement


@given(
    st.floats(1e-5, 1e-2),
    st.lists(
        st.tuples(st.integers(500, 5000), st.floats(0.0, 1.0), st.floats(0.0, 5.0)), min_size=1, max_size=60
    ),
)
def test_a_prefill_is_never_reckoned_dearer_than_the_fastest_call_nor_cheaper_than_it_is(
    token_s: float, calls: list[tuple[int, float, float]]
) -> None:
    """Whatever else took time in the calls, and however much of their prompts was cached."""
    placement = Placement()
    placement.asked("env", 1000)
    whole = [(1000, 0.0, 0.1)] * ENOUGH
    for prompt, share, waited in [*calls, *whole]:
        cached = int(share * prompt)
        placement.answered("e0", prompt, cached, token_s * (prompt - cached) + waited, 0.0)
    found = placement.prefill_s("e0", "env")
    assert found is not None
    assert 0.99 * 1000 * token_s <= found <= 1000 * token_s + 0.1 + 1e-9
    assert placement.prefill_s("e0", "env", token_s=2e-3) == 2.0, "who knows better is believed"


@given(
    st.lists(st.tuples(st.sampled_from(["e0", "e1", "e2"]), st.floats(0.0, 10.0)), max_size=60),
    st.floats(0.1, 30.0),
    st.floats(0.0, 20.0),
)
def test_asking_of_all_engines_at_once_says_what_asking_one_by_one_does(
    ends: list[tuple[str, float]], seconds: float, later: float
) -> None:
    placement, now = Placement(), 0.0
    for engine, gap_s in ends:
        now += gap_s
        placement.freed(engine, now)
        each = [placement.frees_within(engine, seconds, now + later) for engine in ("e0", "e1", "e2")]
        assert placement.all_free_within(3, seconds, now + later) == all(each)


def waits(placement: Placement, here: str, there: str, env: str, now: float) -> bool:
    prefill_s = placement.prefill_s(there, env)
    return prefill_s is not None and placement.frees_within(here, prefill_s, now)


def test_a_member_waits_where_a_permit_comes_sooner_than_a_prefill_elsewhere_would_take() -> None:
    now = 19 * 0.5
    assert waits(told(gap_s=0.5, token_s=1e-3, prompt=1000), "e0", "e1", "env", now)
    assert not waits(told(gap_s=0.5, token_s=1e-3, prompt=400), "e0", "e1", "env", now)
    assert not waits(told(gap_s=2.0, token_s=1e-3, prompt=1000), "e0", "e1", "env", 19 * 2.0)


def test_an_engine_where_nothing_ends_any_more_is_not_waited_for() -> None:
    placement = told(gap_s=0.5, token_s=1e-3, prompt=1000)
    last = 19 * 0.5
    assert waits(placement, "e0", "e1", "env", last + 0.9)
    assert not waits(placement, "e0", "e1", "env", last + 1.1)


def test_nobody_waits_on_what_is_not_known() -> None:
    placement = told(gap_s=0.5, token_s=1e-3, prompt=1000)
    assert not waits(placement, "e2", "e1", "env", 10.0), "nothing has ended there"
    assert not waits(placement, "e0", "e2", "env", 9.5), "no call has come back from there"
    assert not waits(placement, "e0", "e1", "other", 9.5), "its prompts are not known"
    fresh = Placement()
    for n in range(ENOUGH - 1):
        fresh.freed("e0", float(n))
    assert not fresh.frees_within("e0", 100.0, 3.0)


def test_only_a_full_engine_that_is_in_use_is_waited_for() -> None:
    fleet = Fleet(FixedCap(2))
    engines = [
        fleet.joined(EngineJoined(EngineInfo(name, None, None), 0), catch_up=0) for name in ("e0", "e1")
    ]
    fleet.placement = told(gap_s=0.5, token_s=1e-3, prompt=1000)
    now = 19 * 0.5
    here, fresh = (OpenGroup(number, TaskRef("env", "train", number), 4, 0) for number in range(2))
    here.engine = "e0"

    def first() -> OpenGroup | None:
        return fleet.first_to_go([here, fresh], "env", now)

    def hold(engine: EngineState, rollouts: int) -> None:
        engine.in_flight = rollouts
        engine.touch()

    assert first() is here, "its engine has room"
    hold(engines[0], 2)
    assert first() is fresh, "it waits, and who is bound to no engine goes"
    assert fleet.first_to_go([here], "env", now) is None
    hold(engines[1], 2)
    assert first() is here, "no other has room: there is nothing to weigh"
    hold(engines[1], 0)
    fleet.taken_out(engines[0], "gone")
    assert first() is here


class _Seen(ClosedLoop):
    """Notes where each member was started."""

    def __init__(self, admission: Admission, prompt: int) -> None:
        self.placed: defaultdict[GroupId, set[str]] = defaultdict(set)
        self.most = 0
        super().__init__(
            admission,
            lambda random, _now: AgentPlan(prompt, ((0.0, 0, random.randrange(20, 200)),)),
            engines=2,
            group_size=4,
        )

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        self.placed[command.rollout.group].add(command.engine)
        super()._do_StartRollout(command)
        self.most = max(self.most, len(self.agents))

    def split(self) -> float:
        """Share of the groups, the first ones left out, whose members are not all on one engine."""
        groups = [where for group, where in self.placed.items() if group > 20]
        assert len(groups) > 30
        return sum(len(where) > 1 for where in groups) / len(groups)


class _Tells(FixedCap):
    """A fixed cap that has learnt what a prefill costs."""

    def prefill_s(self, engine: str) -> float | None:
        return 3e-5


@pytest.mark.parametrize("admission", [FixedCap(14), _Tells(14)])
def test_groups_with_long_prompts_stay_together_and_no_permit_stands_idle_for_it(
    admission: FixedCap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines with a cap that is no multiple of the group: a member is often left without a permit on its own."""
    loop = _Seen(admission, 12_000)
    loop.run(120.0)
    assert loop.most == 28
    for asked in ("frees_within", "all_free_within"):
        monkeypatch.setattr(Placement, asked, lambda *_: False)
    at_once = _Seen(FixedCap(14), 12_000)
    at_once.run(120.0)
    assert loop.split() < 0.6 * at_once.split()
    assert loop.trace.completed > 1.2 * at_once.trace.completed, (
        "what is not prefilled twice is sampled instead"
    )


def test_members_with_short_prompts_take_whatever_permit_is_free() -> None:
    loop = _Seen(_Tells(14), 64)
    loop.run(120.0)
    assert loop.split() > 0.5


def test_what_prefills_were_seen_to_cost_survives_a_restart() -> None:
    before = told(gap_s=1.0, token_s=1e-3, prompt=2000)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(before.snapshot()))
    after = Placement()
    after.restore(saved)
    assert after.prefill_s("e1", "env") == before.prefill_s("e1", "env")
    assert not after.frees_within("e0", 100.0, 0.0), "how often permits come back is learnt anew"
    after.answered("e1", 2000, 0, 8.0, 5.0)
    assert after.prefill_s("e1", "env") == pytest.approx(2.0, rel=0.01), "and goes on from there"
    assert after.snapshot()["engines"]["e1"][0] == before.snapshot()["engines"]["e1"][0] + 1
    twice = Placement()
    twice.restore(Placement().snapshot())
    assert twice.prefill_s("e1", "env") is None


@pytest.mark.parametrize("kind", [AdaptiveCap, PredictiveCap])
def test_caps_and_learned_costs_are_in_the_checkpoint_and_outlast_a_recovery(
    kind: type[AdaptiveCap] | type[PredictiveCap],
) -> None:
    setup = setup_for(train_env(group_size=4), batch=16, lag=4, max_steps=50)
    world = World(setup, engines=2, admission=kind(Bounds(initial=12, group=4)), watch=Invariants())
    for second in range(10):
        full = EngineLoad(running=12, waiting=20, kv_usage=0.95, preemptions=second)
        world.at(5.0 * second, partial(world.post, LoadReported("e0", full)))
        world.at(5.0 * second, partial(world.post, LoadReported("e1", None)))
    world.run(until=60.0)
    core = world.core
    caps = [core._admission.cap(name) for name in ("e0", "e1")]
    assert kind is PredictiveCap or caps[0] < 12
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(core.snapshot()), strict=False)
    recovered = Recovery(plain).state({rollout.id: rollout for rollout in world.trace.ended}, {})
    admission = kind(Bounds(initial=3))
    again = Core(setup, admission)
    again.restore(recovered, 0)
    for name in ("e0", "e1"):
        admission.joined(EngineInfo(name, None, None))
    assert [admission.cap(name) for name in ("e0", "e1")] == caps
    prefill_s = core.fleet.placement.prefill_s("e0", "env")
    assert prefill_s is not None
    assert again.fleet.placement.prefill_s("e0", "env") == prefill_s
