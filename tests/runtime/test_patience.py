"""What an overloaded engine costs: time, and no token."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from test_runner import END, Script, World, one_call, outcome, reply

from paceline.core.admission import AdaptiveCap, Admission, Bounds, PredictiveCap
from paceline.domain import commands as do
from paceline.domain.load import EngineLoad
from paceline.errors import EngineBusy, EngineError, EngineUnavailable
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.patience import LONGEST_WAIT_S, MOST_BUSY_S, MOST_UNAVAILABLE, Patience
from paceline.runtime.quiet import QuietWatch
from paceline.testing import ScriptedEngine, ScriptedEnv, run_driver, setup_for, train_env
from paceline.testing.run import Controls, DriverRun

BUSY = EngineBusy("engine e0 (http://gpu:8000): answered 429: the queue is full")


def test_waits_double_up_to_a_bound_and_begin_anew_once_a_call_was_taken() -> None:
    patience, now, waits = Patience(), 0.0, []
    for _ in range(6):
        waits.append(patience.after(BUSY, now))
        now += waits[-1] or 0.0
    assert waits == [0.5, 1.0, 2.0, 4.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    patience.served()
    assert patience.after(BUSY, now + 10 * MOST_BUSY_S) == 0.5


def test_an_engine_that_does_not_answer_is_tried_a_few_times_and_one_that_is_busy_for_minutes() -> None:
    patience = Patience()
    gone = EngineUnavailable("gone")
    assert [patience.after(gone, 0.0) for _ in range(MOST_UNAVAILABLE)] == [0.0] * (MOST_UNAVAILABLE - 1) + [
        None
    ]
    patience, now = Patience(), 0.0
    while (wait_s := patience.after(BUSY, now)) is not None:
        now += wait_s
    assert MOST_BUSY_S - LONGEST_WAIT_S <= now <= MOST_BUSY_S


def test_a_storm_of_429_is_waited_out_by_the_turn_and_its_tokens_are_kept() -> None:
    engine = Script(reply([5, 6], "abort"), *[BUSY] * 40, reply([7, END]))
    world = World(one_call, engine)
    rollout = world.run()
    assert outcome(rollout) == ("completed", None)
    assert rollout.turns[0].sampled_ids.tolist() == [5, 6, 7, END]
    assert rollout.gate_s > 30 * LONGEST_WAIT_S
    refused = [r for r in world.gate.reports if r.error is not None]
    assert len(refused) == 40
    assert all(r.is_busy and not r.is_outage for r in refused)


def test_an_engine_that_is_busy_for_ever_fails_the_rollout_with_its_word() -> None:
    world = World(one_call, Script(reply([5, 6], "abort"), BUSY), max_tokens=10)
    rollout = world.run()
    assert outcome(rollout) == ("failed", "engine")
    assert "429" in rollout.outcome.detail
    assert rollout.turns[0].sampled_ids.tolist() == [5, 6]
    assert (rollout.ended - rollout.started) <= MOST_BUSY_S


@pytest.mark.parametrize("cause", ["stale", "shutdown"])
def test_a_rollout_that_waits_for_a_busy_engine_is_stopped_at_once(cause: str) -> None:
    world = World(one_call, Script(reply([5, 6], "abort"), BUSY))
    rollout = world.run((100.0, world.cancel(cause)))
    assert outcome(rollout) == ("cancelled", cause)
    assert rollout.turns[0].sampled_ids.tolist() == [5, 6]
    assert (rollout.ended - rollout.started) == pytest.approx(100.0)


class Crowded(ScriptedEngine):
    """Takes so many calls at once, and refuses the rest; has no metrics, and an address that looks like a refusal."""

    def __init__(self, places: int, id: str = "e0", seconds: float = 2.0) -> None:
        super().__init__(id, answer=lambda _request: "a few words", seconds=lambda _request: seconds)
        self.places, self.refused = places, 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self.running >= self.places:
            self.refused += 1
            raise BUSY
        return await super().generate(request)

    async def load(self) -> EngineLoad:
        raise EngineError("it has no metrics")


@pytest.mark.parametrize("kind", [AdaptiveCap, PredictiveCap])
def test_an_engine_without_metrics_is_held_to_what_it_takes_and_nothing_is_lost(
    kind: type[AdaptiveCap] | type[PredictiveCap],
) -> None:
    admission: Admission = kind(Bounds(initial=48, group=4, most=64))
    setup = setup_for(train_env(group_size=4), batch=32, lag=4, max_steps=12)
    engine = Crowded(places=8)
    run = run_driver(
        setup, {"env": ScriptedEnv()}, engines=[engine], admission=admission, poll_s=5.0, max_seconds=20_000
    )
    assert engine.refused > 50
    assert not [r.outcome for r in run.rollouts if r.outcome.ending == "failed"]
    reasons = [c.reason for _, c in run.commands(do.NoteCap)]
    assert any("refused" in why and "429" in why for why in reasons)
    caps = [c.cap for _, c in run.commands(do.NoteCap)]
    assert min(caps) <= 12
    assert not run.commands(do.ReviveEngine), "a word that it is busy is no outage"


LOST_S = 180.0


def over(*engines: Crowded, said: list[str] | None = None, max_steps: int = 2) -> DriverRun:
    """A run whose `engine.lost_s` is `LOST_S`; what it says when nothing happens goes to `said`."""
    base = setup_for(train_env(group_size=4), batch=8, lag=1, max_steps=max_steps)

    def watch(controls: Controls) -> None:
        tell = ([] if said is None else said).append
        clock = asyncio.get_running_loop().time
        controls.beside("quiet watch", QuietWatch(controls.core, tell, clock, 60.0).run)

    return run_driver(
        msgspec.structs.replace(base, engine_wait_s=LOST_S),
        {"env": ScriptedEnv()},
        engines=engines,
        cap=8,
        during=watch,
        max_seconds=20_000,
    )


def test_a_run_whose_engines_refuse_every_call_ends_with_their_word_after_lost_s() -> None:
    said: list[str] = []
    engines = Crowded(0), Crowded(0, "e1")
    with pytest.raises(
        EngineError, match=r"no engine takes a call any more, .* 180 s \(engine.lost_s\): e0 .*\(429\)"
    ) as caught:
        over(*engines, said=said)
    for engine in ("e0", "e1"):
        assert re.search(
            rf"{engine} has said for \d+ s that it is busy \(429\), and refused \d+ calls", str(caught.value)
        )
    assert "the queue is full" in str(caught.value)
    assert said
    assert re.search(
        r"waits for engine 'e\d' to take its call: it says that it is busy \(429\), and has refused \d+ calls in a row, "
        r"for \d+ s",
        said[0],
    )


def test_a_run_goes_on_while_an_engine_works_on_what_it_took_before_it_refused_the_rest() -> None:
    engine = Crowded(2, seconds=3 * LOST_S)
    run = over(engine)
    assert run.finish is not None
    assert run.finish.status == "done"
    assert engine.refused > 100


def test_a_run_goes_on_while_one_of_its_engines_takes_calls() -> None:
    useless = Crowded(0)
    run = over(useless, Crowded(8, "e1", seconds=20.0), max_steps=20)
    assert run.finish is not None
    assert run.finish.status == "done"
    assert run.seconds > LOST_S
    assert useless.refused > 20
