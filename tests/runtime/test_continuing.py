"""A rollout of an earlier life is answered from its record, and goes on behind it as if nothing had happened."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.config.environment import Limits
from paceline.config.model import SamplingSection
from paceline.domain.commands import ContinueRollout, GrantTurn, StartRollout
from paceline.domain.events import RolloutContinued, SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout
from paceline.domain.task import Split, Task, TaskRef
from paceline.envs import (
    Context,
    Environment,
    ListTasks,
    Model,
    MultiTurnEnv,
    Observation,
    Result,
    SingleTurnEnv,
)
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.runner import RolloutRunner
from paceline.testing import run_virtual
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge

TOKENIZER = byte_tokenizer()
END = TOKENIZER.stop_ids[0]
ID, TASK = RolloutId(3, 1), TaskRef("env", "train", 0)


class Policy:
    """An engine whose every token, and its logprob, follow from the ids before it alone. A token takes a second."""

    def __init__(self, version: int = 0) -> None:
        self.info = EngineInfo("e0", None, None)
        self.version = version
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        context = request.token_ids.tobytes()
        ids: list[int] = []
        logprobs = []
        while len(ids) < request.sampling.max_tokens and END not in ids:
            chance = zlib.crc32(context)
            ids.append(END if chance % 15 == 0 else 97 + chance % 26)
            logprobs.append(-0.01 - chance % 100 / 100)
            context += np.int32(ids[-1]).tobytes()
        await asyncio.sleep(len(ids))
        return GenerateReply(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            "stop" if ids[-1] == END else "length",
            ((self.version, len(ids)),),
        )

    async def abort(self, request_id: str) -> None: ...

    async def load(self) -> EngineLoad:
        raise NotImplementedError

    async def update_weights(self, version: int, path: str) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...


class Gate:
    """Grants three tokens at a time."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.asked: list[TurnRequested] = []

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        self.asked.append(event)
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, "e0", self.version, 3))
        return granted

    def report(self, event: SegmentEnded) -> None: ...


class Kept:
    """Parts in a list."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.over: list[RolloutId] = []

    def keep(self, part: Part) -> None:
        self.parts.append(part)

    def ended(self, rollout: RolloutId) -> None:
        self.over.append(rollout)


class Talk(MultiTurnEnv[int]):
    """Three questions; what is asked depends on the member's own chance. `says` stands in the second."""

    replayable = True

    def __init__(self, says: str = "and") -> None:
        self.says = says
        self.asked = 0

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["a", "b"])

    def start(self, data: Any, ctx: Context) -> tuple[int, str]:
        return 0, f"{data} {ctx.rng.integers(1000)}"

    def step(self, state: int, text: str) -> Observation:
        self.asked += 1
        return Observation(
            f"{self.says} {len(text)}", done=state == 2, reward=float(len(text)), state=state + 1
        )


class Life:
    """One life: an environment, a policy, a gate, and what is left of the life before."""

    def __init__(
        self, env: Environment, version: int = 0, limits: Limits | None = None, **sampling: Any
    ) -> None:
        self.engine, self.gate, self.kept = Policy(version), Gate(version), Kept()
        self.continued: list[RolloutContinued] = []
        self.notes: list[str] = []
        self.shared = EnvRuntime(
            env,
            env.tasks("train"),
            limits or Limits(deadline_s=10_000),
            SamplingSection(**({"max_tokens": 40} | sampling)),
            Bridge(TOKENIZER),
        )

    def run(
        self, *commands: StartRollout | ContinueRollout, left: Sequence[Part] = (), **then: Any
    ) -> Rollout:
        async def main() -> list[Rollout]:
            runner = RolloutRunner(
                {("train", "env"): self.shared},
                {"e0": self.engine},
                self.gate,
                asyncio.get_running_loop().time,
                parts=self.kept,
                left={c.rollout: [p for p in left if p.rollout == c.rollout] for c in commands},
            )
            runner.on_continued, runner.on_note = self.continued.append, self.notes.append
            tasks = [asyncio.create_task(runner.run(command)) for command in commands]
            if then:
                runner.cancel(ID, then["cancel"])
            return await asyncio.gather(*tasks)

        *_, last = run_virtual(main())
        return last


START = StartRollout(ID, TASK, 11, 22, "e0", 0)


def goes_on(parts: Sequence[Part], tokens: int | None = None, **changed: Any) -> ContinueRollout:
    known = sum(part.tokens for part in parts) if tokens is None else tokens
    command = ContinueRollout(ID, TASK, 11, 22, "e0", 0, 0.0, known, len(parts), "")
    return msgspec.structs.replace(command, **changed)


def first_life() -> tuple[Rollout, list[Part]]:
    life = Life(Talk())
    whole = life.run(START)
    assert whole.outcome.ending == "completed"
    assert len(whole.turns) == 3
    assert life.kept.over == [ID]
    return whole, life.kept.parts


def trained(rollout: Rollout) -> list[Any]:
    """What training sees of it."""
    return [
        (
            t.prompt_ids.tolist(),
            t.sampled_ids.tolist(),
            t.logprobs.tolist(),
            t.extends,
            t.finish,
            t.segments,
            t.roles,
        )
        for t in rollout.turns
    ]


def test_killed_behind_any_request_it_ends_with_the_tokens_it_would_have_had() -> None:
    whole, parts = first_life()
    assert len(parts) > 6
    assert {part.finish for part in parts} == {"stop", "abort"}
    for known in range(len(parts) + 1):
        left = parts[:known]
        life = Life(Talk(), version=7)
        again = life.run(goes_on(left), left=left)
        assert trained(again) == trained(whole)
        assert (again.reward, again.messages, again.turn_rewards) == (
            whole.reward,
            whole.messages,
            whole.turn_rewards,
        )
        (told,) = life.continued
        assert (told.tokens, told.lost, told.why) == (sum(p.tokens for p in left), 0, "")
        assert told.is_mid_turn == (bool(left) and left[-1].finish == "abort")
        assert told.oldest == (0 if left else None)
        # Nothing is sampled again, and nothing is kept twice.
        assert len(life.engine.requests) == len(life.gate.asked) == len(parts) - known
        assert [p.number for p in life.kept.parts] == list(range(known, len(parts)))
        runs = [run for turn in again.turns for run in turn.versions]
        assert sum(n for version, n in runs if version == 0) == told.tokens
        assert sum(n for version, n in runs if version == 7) == whole.sampled_tokens - told.tokens
        if left:
            assert again.turns[0].started == whole.turns[0].started


def test_times_and_seconds_of_what_was_recorded_stay() -> None:
    whole, parts = first_life()
    life = Life(Talk())
    again = life.run(goes_on(parts), left=parts)
    assert [(t.started, t.ended, t.engine, t.cached_tokens) for t in again.turns] == [
        (t.started, t.ended, t.engine, t.cached_tokens) for t in whole.turns
    ]
    assert again.model_s == whole.model_s
    assert not life.engine.requests


def test_a_rollout_that_strays_goes_on_from_there_and_it_is_told_once_for_its_environment() -> None:
    whole, parts = first_life()
    other = RolloutId(3, 2)
    twin = [msgspec.structs.replace(part, rollout=other) for part in parts]
    life = Life(Talk(says="but"))
    tokens = whole.sampled_tokens
    again = life.run(goes_on(twin, rollout=other), goes_on(parts), left=[*parts, *twin])
    assert trained(again)[0] == trained(whole)[0], "the first answer was to a question that was asked again"
    assert "but" in again.messages[2].content
    first = whole.turns[0]
    for told in life.continued:
        assert (told.tokens, told.lost) == (len(first.sampled_ids), tokens - len(first.sampled_ids))
        assert (told.turns, told.is_mid_turn) == (1, False)
        assert "turn 1 is not what it was: its prompt has" in told.why
    (note,) = life.notes
    assert "env 'env' does not do again" in note
    assert "turn 1" in note
    # What is kept of it now stands in the place of what it left.
    kept = [p for p in life.kept.parts if p.rollout == ID]
    assert (kept[0].number, kept[0].turn, kept[0].before) == (len(parts), 1, 0)


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"max_tokens": 39}, {"stop": ["zzz"]}])
def test_other_settings_leave_the_record_at_its_beginning(sampling: dict[str, Any]) -> None:
    _, parts = first_life()
    life = Life(Talk(), version=3, **sampling)
    again = life.run(goes_on(parts), left=parts)
    (told,) = life.continued
    assert (told.tokens, told.oldest) == (0, None)
    assert "it is asked for with" in told.why
    assert {version for turn in again.turns for version, _ in turn.versions} == {3}


def test_tokens_that_were_never_written_are_told_as_lost_and_nobody_is_blamed() -> None:
    _, parts = first_life()
    life = Life(Talk())
    life.run(goes_on(parts[:2], tokens=50), left=parts[:2])
    (told,) = life.continued
    assert told.tokens + told.lost == 50
    assert told.why == "the end of its record had not been written"
    assert not life.notes


def test_budgets_and_the_deadline_count_what_was_used() -> None:
    budget = Limits(deadline_s=10_000, max_rollout_tokens=12)
    first = Life(Talk(), limits=budget)
    whole = first.run(START)
    assert (whole.outcome.cause, whole.sampled_tokens) == ("tokens", 12)
    left = first.kept.parts[:3]
    life = Life(Talk(), limits=budget)
    again = life.run(goes_on(left), left=left)
    assert (again.outcome, trained(again)) == (whole.outcome, trained(whole))
    assert life.continued[0].lost == 0
    late = Life(Talk(), limits=Limits(deadline_s=100.0))
    ended = late.run(goes_on(left, started=-95.0), left=left)
    assert (ended.outcome.ending, ended.outcome.cause) == ("truncated", "deadline")
    assert ended.started == -95.0
    assert 5.0 <= ended.ended <= 8.0, "its request under way comes back first"


def test_the_deadline_leaves_out_what_it_stood_still() -> None:
    whole, parts = first_life()
    life = Life(Talk(), limits=Limits(deadline_s=200.0))
    again = life.run(goes_on(parts[:2], started=-500.0, stood_s=500.0), left=parts[:2])
    assert trained(again) == trained(whole)
    assert again.started == -500.0


def test_one_that_is_cancelled_before_it_begins_ends_as_that() -> None:
    _, parts = first_life()
    life = Life(Talk())
    ended = life.run(goes_on(parts), left=parts, cancel="shutdown")
    assert (ended.outcome.ending, ended.outcome.cause) == ("cancelled", "shutdown")
    assert not life.engine.requests
    (told,) = life.continued  # else its tokens would stay with a record that has none
    assert (told.tokens, told.lost) == (0, sum(part.tokens for part in parts))
    assert told.why == "it ended before its record did"


def test_single_turn_environments_may_be_run_again_unless_they_write_their_own_course() -> None:
    class Plain(SingleTurnEnv):
        pass

    class Own(SingleTurnEnv):
        async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
            return Result(0.0)

    class OwnAndSays(Own):
        replayable = True

    assert [each.replayable for each in (Environment, MultiTurnEnv, Plain, Own, OwnAndSays)] == [
        False,
        False,
        True,
        False,
        True,
    ]
