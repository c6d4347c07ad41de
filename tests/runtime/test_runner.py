"""The rollout runner in a scripted world: every rollout ends once, with its cause, and keeps its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from paceline.config.environment import Limits
from paceline.config.model import SamplingSection
from paceline.core.samples import build_samples
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.events import SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.envs import (
    Context,
    Environment,
    InfrastructureError,
    ListTasks,
    Model,
    MultiTurnEnv,
    Observation,
    Result,
    RolloutTruncated,
    SingleTurnEnv,
)
from paceline.errors import EngineError, EngineUnavailable, EnvError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.model import EMPTY_ABORTS, LONG_TEXT
from paceline.runtime.runner import RolloutRunner
from paceline.testing import run_virtual
from paceline.testing.tokens import CHATML, byte_tokenizer
from paceline.tokens import Bridge, assistant, user

TOKENIZER = byte_tokenizer()
END = TOKENIZER.stop_ids[0]


class Script:
    """An engine that says what it is told, one token a `token_s`, and can be aborted."""

    def __init__(self, *answers: Any, token_s: float = 0.0, version: int = 0, deaf: bool = False) -> None:
        """An answer is a text (an end token is added), a reply, an exception, or a function of the request."""
        self.answers = list(answers)
        self.token_s = token_s
        self.version = version
        self.deaf = deaf  # does not hear aborts
        self.requests: list[GenerateRequest] = []
        self.running: dict[str, asyncio.Event] = {}
        self.info = EngineInfo("e0", None, None)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, GenerateReply):
            return answer
        ids = [*TOKENIZER.encode(answer).tolist(), END] if isinstance(answer, str) else list(answer)
        stop = self.running[request.request_id] = asyncio.Event()
        allowed, finish = request.sampling.max_tokens, "stop"
        if len(ids) > allowed:
            ids, finish = ids[:allowed], "length"
        count = 0
        try:
            if self.token_s:
                for count in range(1, len(ids) + 1):
                    try:
                        async with asyncio.timeout(self.token_s):
                            await stop.wait()
                    except TimeoutError:
                        continue
                    ids, finish = ids[: count - 1], "abort"
                    break
        finally:
            del self.running[request.request_id]
        return reply(ids, finish, self.version)

    async def abort(self, request_id: str) -> None:
        if not self.deaf and request_id in self.running:
            self.running[request_id].set()

    async def load(self) -> EngineLoad:
        raise NotImplementedError

    async def update_weights(self, version: int, path: str) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...


def reply(ids: list[int], finish: str = "stop", version: int = 0, logprobs: Any = None) -> GenerateReply:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    runs = ((version, len(ids)),) if ids else ()
    return GenerateReply(np.array(ids, np.int32), np.array(values, np.float32), finish, runs)  # type: ignore[arg-type]


class Gate:
    """Grants at once, after a while, or never."""

    def __init__(self, version: int = 0, delay: float | None = 0.0) -> None:
        self.version = version
        self.delay = delay
        self.requested: list[TurnRequested] = []
        self.granted = 0
        self.reports: list[SegmentEnded] = []

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        self.requested.append(event)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GrantTurn] = loop.create_future()

        def grant() -> None:
            if not future.done():
                self.granted += 1
                future.set_result(GrantTurn(event.rollout, "e0", self.version))

        if self.delay is not None:
            loop.call_later(self.delay, grant) if self.delay else loop.call_soon(grant)
        return future

    def report(self, event: SegmentEnded) -> None:
        self.reports.append(event)


class Calls(Environment):
    """An environment that is one function."""

    def __init__(self, rollout: Callable[..., Awaitable[Any]], on_truncated: Any = None) -> None:
        self._rollout = rollout
        self._on_truncated = on_truncated

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        return await self._rollout(model, ctx)

    async def on_truncated(self, task: Any, model: Model, ctx: Context, limit: Any) -> Result | None:
        return await self._on_truncated(model, ctx, limit) if self._on_truncated else None


class World:
    """One environment, one engine, one gate, one runner."""

    def __init__(
        self,
        env: Environment | Callable[..., Awaitable[Any]],
        engine: Script | None = None,
        *,
        gate: Gate | None = None,
        limits: Limits | None = None,
        tasks: list[Any] | None = None,
        noise_by_position: bool = False,
        **sampling: Any,
    ) -> None:
        self.engine = engine or Script("ok")
        self.gate = gate or Gate()
        shared = EnvRuntime(
            env if isinstance(env, Environment) else Calls(env),
            ListTasks(tasks if tasks is not None else ["task"] * 9),
            limits or Limits(deadline_s=1000),
            SamplingSection(**({"max_tokens": 100} | sampling)),
            Bridge(TOKENIZER),
        )
        self.runner = RolloutRunner(
            {("train", "env"): shared},
            {"e0": self.engine},
            self.gate,
            lambda: asyncio.get_running_loop().time(),
            noise_by_position=noise_by_position,
        )

    def start(self, member: int = 0, index: int = 0) -> asyncio.Task[Rollout]:
        command = StartRollout(RolloutId(3, member), TaskRef("env", "train", index), 11, 22 + member, "e0", 0)
        return asyncio.get_running_loop().create_task(self.runner.run(command))

    def run(self, *then: tuple[float, Callable[[], Any]], index: int = 0) -> Rollout:
        """Run one rollout in virtual time; `then` are things to do at their times."""

        async def main() -> Rollout:
            for at, act in then:
                asyncio.get_running_loop().call_later(at, act)
            rollout = await self.start(index=index)
            assert self.runner.running == 0
            assert not self.engine.running
            assert len(self.gate.reports) == self.gate.granted
            return rollout

        return run_virtual(main())

    def cancel(self, cause: Any = "stale") -> Callable[[], None]:
        return lambda: self.runner.cancel(RolloutId(3, 0), cause)


def test_a_cancellation_that_a_request_for_a_turn_brings_about_ends_its_wait_at_once() -> None:
    class Sheds(Gate):
        def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
            future = super().request(event)
            world.runner.cancel(event.rollout, "stale")
            return future

    async def rollout(model: Model, ctx: Context) -> Result:
        call = asyncio.create_task(model.chat("x"))
        try:
            await asyncio.wait({call})
        finally:
            await asyncio.wait({call})
        return Result(1.0)

    world = World(rollout, gate=Sheds(delay=None))
    ended = world.run()
    assert (ended.outcome.ending, ended.outcome.cause) == ("cancelled", "stale")
    assert ended.ended - ended.started < 1.0


async def one_call(model: Model, ctx: Context) -> Result:
    reply = await model.chat("hi")
    return Result(reward=float(reply.text == "ok"))


def outcome(rollout: Rollout) -> tuple[str, str | None]:
    return rollout.outcome.ending, rollout.outcome.cause


# ── how rollouts end ──


def test_a_rollout_completes_with_its_turns_its_reward_and_its_times() -> None:
    world = World(one_call, Script("ok", token_s=1.0), gate=Gate(delay=5.0))
    rollout = world.run()
    assert outcome(rollout) == ("completed", None)
    assert rollout.reward == 1.0
    assert [m.content for m in rollout.messages] == ["hi", "ok"]
    assert (rollout.gate_s, rollout.model_s, rollout.ended) == (5.0, 3.0, 8.0)
    (turn,) = rollout.turns
    assert (turn.queued_s, turn.started, turn.ended, turn.engine) == (5.0, 5.0, 8.0, "e0")
    assert turn.sampled_ids.tolist() == [*TOKENIZER.encode("ok").tolist(), END]
    assert not any(a.flags.writeable for a in (turn.prompt_ids,))


def test_s01_a_cancellation_that_the_environment_raised_by_itself_ends_one_rollout_only() -> None:
    async def member(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        if ctx.rollout.member == 2:
            raise asyncio.CancelledError
        return Result(reward=float(ctx.rollout.member == 0))

    world = World(member)

    async def main() -> list[Rollout]:
        return await asyncio.gather(*[world.start(m) for m in range(4)])

    ended = run_virtual(main())
    assert [outcome(r) for r in ended] == [
        ("completed", None),
        ("completed", None),
        ("cancelled", "self"),
        ("completed", None),
    ]
    assert [r.reward for r in ended] == [1.0, 0.0, None, 0.0]
    assert len(ended[2].turns) == 1


def test_s03_a_rollout_that_never_answers_is_truncated_at_its_deadline_and_torn_down() -> None:
    torn_down = []

    async def member(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        if ctx.rollout.member < 3:
            await ctx.sleep(1)
            return Result(reward=1.0)
        try:
            await asyncio.Event().wait()
        finally:
            torn_down.append(asyncio.get_running_loop().time())
        raise AssertionError

    world = World(member, limits=Limits(deadline_s=5))

    async def main() -> list[Rollout]:
        return await asyncio.gather(*[world.start(m) for m in range(4)])

    ended = run_virtual(main())
    assert [outcome(r) for r in ended] == [("completed", None)] * 3 + [("truncated", "deadline")]
    assert ended[3].ended == 5.0
    assert torn_down == [5.0]
    assert ended[3].reward is None
    assert "5 s (limits.deadline_s)" in ended[3].outcome.detail
    assert "not scored" in ended[3].outcome.detail


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("bad"), "environment"),
        (EnvError("bad"), "environment"),
        (FileNotFoundError("bad"), "environment"),
        (SystemExit(1), "environment"),
        (ConnectionResetError("bad"), "infrastructure"),
        (TimeoutError("bad"), "infrastructure"),
        (OSError(28, "No space left on device"), "infrastructure"),
        (InfrastructureError("bad"), "infrastructure"),
        (ExceptionGroup("both", [TimeoutError("bad"), ConnectionError("bad")]), "infrastructure"),
        (ExceptionGroup("both", [TimeoutError("bad"), ValueError("bad")]), "environment"),
    ],
)
def test_what_the_environment_raises_decides_the_cause(error: BaseException, cause: str) -> None:
    async def raises(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        raise error

    rollout = World(raises).run()
    assert outcome(rollout) == ("failed", cause)
    assert type(getattr(error, "exceptions", [error])[0]).__name__ in rollout.outcome.detail
    assert len(rollout.turns) == 1


def test_an_error_that_wraps_a_broken_connection_is_infrastructure() -> None:
    async def raises(model: Model, ctx: Context) -> Result:
        try:
            raise ConnectionRefusedError("sandbox")
        except ConnectionRefusedError as error:
            raise RuntimeError("client failed") from error

    assert outcome(World(raises).run()) == ("failed", "infrastructure")


@pytest.mark.parametrize(
    ("result", "ending", "cause", "told"),
    [
        (Result(None), "failed", "unscored", "no reward"),
        (Result(float("nan")), "failed", "unscored", "nan"),
        (Result(float("inf")), "failed", "unscored", "inf"),
        (Result("high"), "failed", "unscored", "must be numbers"),  # type: ignore[arg-type]
        (1.0, "failed", "environment", "returned float; expected Result"),
        (None, "failed", "environment", "returned NoneType; expected Result"),
        (Result(np.float32(0.5)), "completed", None, ""),  # type: ignore[arg-type]
        (Result(0.7, metrics={"b": float("nan")}), "completed", None, ""),
        (Result(0.7, trains=np.bool_(True)), "completed", None, ""),  # type: ignore[arg-type]
        # One of these in a journal, and nobody could read it again.
        (Result(0.7, role=0), "failed", "unscored", "role is 0; expected a text"),  # type: ignore[arg-type]
        (Result(0.7, role=None), "failed", "unscored", "role is None; expected a text"),  # type: ignore[arg-type]
        (Result(0.7, trains=1), "failed", "unscored", "trains is 1; expected true or false"),  # type: ignore[arg-type]
        (Result(0.7, trains=None), "failed", "unscored", "trains is None"),  # type: ignore[arg-type]
        (Result(0.7, truncated="turns"), "truncated", "turns", ""),
    ],
)
def test_a_result_is_checked(result: Any, ending: str, cause: str | None, told: str) -> None:
    async def returns(model: Model, ctx: Context) -> Any:
        await model.chat("hi")
        return result

    rollout = World(returns).run()
    assert outcome(rollout) == (ending, cause)
    assert told in rollout.outcome.detail
    assert (rollout.reward is None) == (ending == "failed")


def test_a_rollout_that_sampled_nothing_is_empty() -> None:
    async def silent(model: Model, ctx: Context) -> Result:
        return Result(reward=1.0)

    assert outcome(World(silent).run()) == ("failed", "empty")
    assert outcome(World(one_call, Script(reply([]))).run()) == ("failed", "empty")

    async def silent_and_odd(model: Model, ctx: Context) -> Result:
        return Result(1.0, role=0, rewards={"a": "much"})  # type: ignore[arg-type, dict-item]

    rollout = World(silent_and_odd).run()
    assert (outcome(rollout), rollout.role, rollout.rewards) == (("failed", "empty"), "", {})


def test_a_task_that_cannot_be_read_is_the_environments_failure() -> None:
    rollout = World(one_call, tasks=[]).run()
    assert outcome(rollout) == ("failed", "environment")
    assert "IndexError" in rollout.outcome.detail


def test_info_that_no_journal_can_hold_is_replaced_by_a_note() -> None:
    async def returns(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        return Result(1.0, info={"x": object()})

    assert "not JSON-like" in World(returns).run().info["not_stored"]


# ── what is recorded ──


def test_s16_a_request_holds_the_prompt_and_nothing_of_an_earlier_attempt() -> None:
    world = World(one_call, Script("ok", token_s=1.0, version=2), gate=Gate(version=2))
    first = world.run((1.5, world.cancel("stale")))
    assert outcome(first) == ("cancelled", "stale")
    assert first.sampled_tokens == 1
    world.engine.version = world.gate.version = 4
    second = world.run()
    prompts = [request.token_ids.tolist() for request in world.engine.requests]
    assert prompts[0] == prompts[1] == TOKENIZER.encode(TOKENIZER.render([user("hi")])).tolist()
    assert (second.oldest_version, second.newest_version) == (4, 4)


def test_s17_versions_cover_sampled_tokens_only() -> None:
    versions = iter((4, 5))

    def answer(request: GenerateRequest) -> GenerateReply:
        return reply([7, END], version=next(versions))

    async def two(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        await model.chat("more")
        return Result(1.0)

    rollout = World(two, Script(answer)).run()
    assert (rollout.oldest_version, rollout.newest_version) == (4, 5)
    assert [turn.versions for turn in rollout.turns] == [((4, 2),), ((5, 2),)]
    empty = World(one_call, Script(reply([]))).run()
    assert (empty.oldest_version, empty.newest_version) == (None, None)


def generated(*prompts: list[int]) -> Callable[..., Awaitable[Result]]:
    async def calls(model: Model, ctx: Context) -> Result:
        for prompt in prompts:
            await model.generate(prompt)
        return Result(1.0)

    return calls


def test_s19_three_growing_turns_make_one_sample() -> None:
    engine = Script(
        reply([3], logprobs=[-0.1]), reply([5, 6], logprobs=[-0.2, -0.3]), reply([8], logprobs=[-0.4])
    )
    rollout = World(generated([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]), engine).run()
    assert [turn.extends for turn in rollout.turns] == [False, True, True]
    assert [turn.prompt_ids.tolist() for turn in rollout.turns] == [[1, 2], [4], [7]]
    (sample,) = build_samples(rollout, seq_len=100, overlong="drop").samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.trainable.tolist() == [bool(x) for x in (0, 0, 1, 0, 1, 1, 0, 1)]
    assert sample.logprobs == pytest.approx([0, 0, -0.1, 0, -0.2, -0.3, 0, -0.4])


def test_s20_a_broken_prefix_starts_a_new_sample() -> None:
    engine = Script(reply([3, 4]), reply([5]), reply([7]))
    rollout = World(generated([1, 2], [1, 2, 9], [1, 2, 9, 5, 6]), engine).run()
    assert [turn.extends for turn in rollout.turns] == [False, False, True]
    built = build_samples(rollout, seq_len=100, overlong="drop")
    assert [s.token_ids.tolist() for s in built.samples] == [[1, 2, 3, 4], [1, 2, 9, 5, 6, 7]]
    assert [s.trainable.tolist() for s in built.samples] == [
        [bool(x) for x in (0, 0, 1, 1)],
        [bool(x) for x in (0, 0, 0, 1, 0, 1)],
    ]
    assert built.prefix_breaks == 1


def test_s25_a_sampled_end_token_keeps_its_logprob() -> None:
    rollout = World(one_call, Script(reply([5, END], logprobs=[-0.5, -3.912]))).run()
    (sample,) = build_samples(rollout, seq_len=100, overlong="drop").samples
    assert sample.token_ids[-1] == END
    assert sample.trainable[-1]
    assert sample.logprobs[-1] == pytest.approx(-3.912)


def test_s27_a_reply_without_ids_is_refused_and_not_padded() -> None:
    bad = GenerateReply(np.empty(0, np.int32), np.array([-0.1, -0.2], np.float32), "stop", ())
    rollout = World(one_call, Script(bad)).run()
    assert outcome(rollout) == ("failed", "engine")
    assert "0 token ids and 2 logprobs" in rollout.outcome.detail
    assert rollout.turns == ()


def test_s29_fewer_logprobs_than_tokens_fail_that_rollout_only() -> None:
    engine = Script(reply([5, 6, END], logprobs=[-0.5]), "ok")
    world = World(one_call, engine)
    assert outcome(world.run()) == ("failed", "engine")
    assert outcome(world.run()) == ("completed", None)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.3, -9999.0])
def test_s89_a_logprob_that_is_none_fails_with_position_and_value(value: float) -> None:
    world = World(one_call, Script(reply([5, 6, END], logprobs=[-0.5, value, -0.1])))
    rollout = world.run()
    assert outcome(rollout) == ("failed", "engine")
    assert f"{np.float32(value):.1f}"[:4] in rollout.outcome.detail
    assert "sampled token 1 (id 6)" in rollout.outcome.detail
    (report,) = world.gate.reports
    assert report.error is not None


def test_other_nonsense_of_an_engine_is_named() -> None:
    many = World(one_call, Script(reply([1] * 9)), max_tokens=3).run()
    assert "9 tokens where at most 3" in many.outcome.detail
    wide = GenerateReply(np.array([1]), np.array([-1.0], np.float32), "stop", ((0, 1),))
    assert "int64 ids and float32 logprobs" in World(one_call, Script(wide)).run().outcome.detail
    runs = GenerateReply(np.array([1], np.int32), np.array([-1.0], np.float32), "stop", ((0, 2),))
    assert "do not add up" in World(one_call, Script(runs)).run().outcome.detail


# ── limits ──


def test_s36_a_history_that_outgrows_the_context_is_truncated_and_scored() -> None:
    async def three(model: Model, ctx: Context) -> Result:
        for prompt in (list(range(20)), None, None):
            said = prompt or [*history, *([9] * (10 if len(history) == 50 else 14))]
            reply = await model.generate(said)
            history[:] = [*said, *reply.token_ids.tolist()]
        raise AssertionError("the third turn must not be sampled")

    async def judge(model: Model, ctx: Context, limit: str) -> Result:
        return Result(0.25, info={"limit": limit})

    history: list[int] = []
    engine = Script([1] * 30)
    world = World(Calls(three, judge), engine, limits=Limits(max_context=100), max_tokens=40)
    rollout = world.run()
    assert outcome(rollout) == ("truncated", "context")
    assert [r.sampling.max_tokens for r in engine.requests] == [40, 40]
    assert (len(rollout.turns), rollout.sampled_tokens) == (2, 60)
    assert (rollout.reward, rollout.info) == (0.25, {"limit": "context"})
    assert "prompt of 104 tokens, context of 100" in rollout.outcome.detail


def test_s36_a_first_prompt_that_is_too_long_is_no_request_and_no_truncation() -> None:
    world = World(generated([1] * 101), limits=Limits(max_context=100))
    rollout = world.run()
    assert outcome(rollout) == ("failed", "environment")
    assert "prompt too long: prompt of 101 tokens, context of 100" in rollout.outcome.detail
    assert world.engine.requests == []
    assert world.gate.requested == []


def test_the_context_shrinks_max_tokens_and_is_the_limit_then() -> None:
    engine = Script([1] * 30)
    rollout = World(generated([1] * 90), engine, limits=Limits(max_context=100), max_tokens=40).run()
    assert engine.requests[0].sampling.max_tokens == 10
    assert outcome(rollout) == ("truncated", "context")
    assert rollout.reward == 1.0


def test_the_engines_own_context_counts_where_the_limit_is_larger_or_none() -> None:
    engine = Script([1] * 30)
    engine.info = EngineInfo("e0", None, 95)
    World(generated([1] * 90), engine, limits=Limits(max_context=100), max_tokens=40).run()
    assert engine.requests[0].sampling.max_tokens == 5


def test_the_token_budget_shrinks_max_tokens_and_then_ends_the_rollout() -> None:
    async def until_cut(model: Model, ctx: Context) -> Result:
        try:
            while True:
                await model.chat("go on")
        except RolloutTruncated:
            return Result(0.5)

    engine = Script("abc")
    rollout = World(until_cut, engine, limits=Limits(max_rollout_tokens=10)).run()
    assert [r.sampling.max_tokens for r in engine.requests] == [10, 6, 2]
    assert outcome(rollout) == ("truncated", "tokens")
    assert (rollout.sampled_tokens, rollout.reward) == (10, 0.5)


def test_the_turn_limit_ends_the_rollout_with_what_it_has_earned() -> None:
    class Steps(MultiTurnEnv[int]):
        def start(self, data: Any, ctx: Context) -> tuple[int, str]:
            return 0, "begin"

        def step(self, state: int, text: str) -> Observation:
            return Observation("next", reward=1.0, state=state + 1)

    rollout = World(Steps(), limits=Limits(max_turns=3)).run()
    assert outcome(rollout) == ("truncated", "turns")
    assert (len(rollout.turns), rollout.reward) == (3, 3.0)
    assert [m.content for m in rollout.messages] == ["begin", "ok", "next", "ok", "next", "ok"]


def test_s37_a_cut_answer_is_truncated_with_its_own_score_and_a_finished_one_is_not() -> None:
    seen = []

    async def look(model: Model, ctx: Context) -> Result:
        reply = await model.chat("hi")
        seen.append((reply.text, reply.finish))
        return Result(0.3)

    cut = World(look, Script("abcdef"), max_tokens=4).run()
    assert (outcome(cut), cut.reward) == (("truncated", "tokens"), 0.3)
    assert seen == [("abcd", "length")]
    done = World(look, Script("abc"), max_tokens=4, limits=Limits(max_rollout_tokens=4)).run()
    assert (outcome(done), done.reward) == (("completed", None), 0.3)


def test_a_call_that_the_environment_itself_cuts_short_is_no_truncation() -> None:
    async def choose(model: Model, ctx: Context) -> Result:
        reply = await model.chat("A or B?", max_tokens=1)
        return Result(float(reply.text == "A"))

    assert outcome(World(choose, Script("A because")).run()) == ("completed", None)


def test_a_deadline_while_the_model_speaks_keeps_its_tokens_and_is_scored() -> None:
    class Scores(SingleTurnEnv):
        def prompt(self, data: Any) -> str:
            return "hi"

        def score(self, data: Any, text: str) -> float:
            return len(text) / 10

    world = World(Scores(), Script("abcdefgh", token_s=1.0), limits=Limits(deadline_s=3.5))
    rollout = world.run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert (rollout.sampled_tokens, rollout.reward) == (3, 0.3)
    assert (rollout.turns[0].finish, rollout.ended) == ("abort", 3.5)
    assert rollout.messages[-1].content == "abc"


def test_a_deadline_at_the_gate_ends_the_wait_and_sends_no_request() -> None:
    world = World(one_call, gate=Gate(delay=None), limits=Limits(deadline_s=7))
    rollout = world.run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert rollout.ended == 7.0
    assert world.engine.requests == []


def test_s62_a_scorer_that_hangs_after_the_deadline_is_cut_by_its_own_limit() -> None:
    async def slow(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        await ctx.sleep(1e9)
        raise AssertionError

    async def judge(model: Model, ctx: Context, limit: str) -> Result:
        await ctx.sleep(1e9)
        raise AssertionError

    rollout = World(Calls(slow, judge), limits=Limits(deadline_s=60, score_s=15)).run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert rollout.ended == 75.0
    assert "not scored within 15 s (limits.score_s)" in rollout.outcome.detail


def test_a_judge_that_raises_leaves_a_truncated_rollout_unscored() -> None:
    async def judge(model: Model, ctx: Context, limit: str) -> Result:
        raise ValueError("no idea")

    rollout = World(Calls(one_call, judge), gate=Gate(delay=None), limits=Limits(deadline_s=1)).run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert rollout.reward is None
    assert "not scored: ValueError: no idea" in rollout.outcome.detail


def test_an_environment_that_ignores_its_cancellation_is_cancelled_again() -> None:
    async def stubborn(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        for _ in range(3):
            try:
                await ctx.sleep(1e9)
            except asyncio.CancelledError:
                continue
        return Result(0.5)

    rollout = World(stubborn, limits=Limits(deadline_s=10)).run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert (rollout.reward, rollout.ended) == (0.5, 20.0)


def test_calling_on_after_the_end_neither_samples_nor_holds_up_the_loop() -> None:
    async def deaf(model: Model, ctx: Context) -> Result:
        while True:
            try:
                await model.chat("hi")
            except RolloutTruncated:
                continue

    world = World(deaf, limits=Limits(max_turns=1, deadline_s=1e-3))

    async def main() -> Rollout:
        # Virtual time stands still while something is ready to run, so the deadline is moved on by hand.
        task = world.start()
        for _ in range(100):
            await asyncio.sleep(0)
        world.cancel("shutdown")()
        for _ in range(10):
            if task.done():
                break
            await asyncio.sleep(0)
        return await task

    rollout = run_virtual(main())
    assert outcome(rollout) == ("cancelled", "shutdown")
    assert len(world.engine.requests) == 1


# ── cancelling ──


@pytest.mark.parametrize("at", [0.5, 2.5, 50.0])
def test_a_cancelled_rollout_keeps_its_tokens_wherever_it_is(at: float) -> None:
    async def call_and_wait(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        await ctx.sleep(100)
        return Result(1.0)

    world = World(call_and_wait, Script("abc", token_s=1.0), gate=Gate(delay=1.0))
    rollout = world.run((at, world.cancel("overload")))
    assert outcome(rollout) == ("cancelled", "overload")
    assert rollout.ended == at
    assert rollout.sampled_tokens == {0.5: 0, 2.5: 1, 50.0: 4}[at]
    assert rollout.reward is None


def test_a_cancelled_request_is_reported_with_the_tokens_it_had() -> None:
    world = World(one_call, Script("abcdef", token_s=1.0, version=6))
    rollout = world.run((3.5, world.cancel()))
    (report,) = world.gate.reports
    assert (report.versions, report.finish, report.seconds) == (((6, 3),), "abort", 3.5)
    assert rollout.turns[0].versions == ((6, 3),)


def test_an_engine_that_does_not_hear_an_abort_is_given_five_seconds() -> None:
    world = World(one_call, Script("abcdefghijkl", token_s=1.0, deaf=True))
    rollout = world.run((3.5, world.cancel()))
    assert outcome(rollout) == ("cancelled", "stale")
    assert rollout.ended == 8.5
    (report,) = world.gate.reports
    assert (report.versions, report.error) == ((), "cancelled while it ran")


def test_an_answer_that_arrives_while_it_is_aborted_counts() -> None:
    world = World(one_call, Script("abc", token_s=1.0, deaf=True))
    rollout = world.run((3.5, world.cancel()))
    assert outcome(rollout) == ("cancelled", "stale")
    assert (rollout.sampled_tokens, rollout.ended) == (4, 4.0)


def test_a_grant_in_the_moment_of_cancelling_is_answered() -> None:
    world = World(one_call, gate=Gate(delay=1.0))

    async def main() -> Rollout:
        loop = asyncio.get_running_loop()
        task = world.start()
        await asyncio.sleep(0)
        loop.call_later(1.0, world.cancel())  # same instant, right after the grant
        return await task

    rollout = run_virtual(main())
    assert outcome(rollout) == ("cancelled", "stale")
    assert [r.finish for r in world.gate.reports] == ["abort"]
    assert world.engine.requests == []


def test_cleaning_up_after_a_cancellation_delays_the_record() -> None:
    async def careful(model: Model, ctx: Context) -> Result:
        try:
            await ctx.sleep(100)
        finally:
            await ctx.sleep(3)
        raise AssertionError

    world = World(careful)
    assert world.run((1.0, world.cancel())).ended == 4.0


def test_a_rollout_that_is_cancelled_before_its_first_step_never_begins() -> None:
    world = World(one_call)

    async def main() -> Rollout:
        task = world.start()
        world.cancel("shutdown")()
        return await task

    rollout = run_virtual(main())
    assert outcome(rollout) == ("cancelled", "shutdown")
    assert world.gate.requested == []


def test_cancelling_what_has_ended_changes_nothing_and_leaves_nothing() -> None:
    world = World(one_call)

    async def main() -> Rollout:
        await world.start()
        world.cancel()()
        await asyncio.sleep(0)
        assert world.runner._early == {}
        return await world.start()

    assert outcome(run_virtual(main())) == ("completed", None)


def test_a_rollout_that_is_cancelled_while_it_is_judged_is_cancelled() -> None:
    async def judge(model: Model, ctx: Context, limit: str) -> Result:
        await ctx.sleep(1000)
        return Result(1.0)

    world = World(Calls(one_call, judge), gate=Gate(delay=None), limits=Limits(deadline_s=5, score_s=2000))
    rollout = world.run((9.0, world.cancel("shutdown")))
    assert (outcome(rollout), rollout.ended) == (("cancelled", "shutdown"), 9.0)


def test_the_first_cause_stands_when_cancelled_twice() -> None:
    world = World(one_call, Script("abc", token_s=10.0))
    rollout = world.run((1.0, world.cancel("stale")), (1.0, world.cancel("shutdown")))
    assert rollout.outcome.cause == "stale"


def test_a_result_that_is_returned_in_spite_of_a_cancellation_does_not_count() -> None:
    async def returns(model: Model, ctx: Context) -> Result:
        try:
            await ctx.sleep(100)
        except asyncio.CancelledError:
            return Result(1.0)
        raise AssertionError

    world = World(returns)
    rollout = world.run((1.0, world.cancel()))
    assert (outcome(rollout), rollout.reward) == (("cancelled", "stale"), None)


class Unheard(BaseException):
    """Like no exception that anybody expects."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unheard("of")])
def test_an_exception_that_would_leave_the_loop_fails_its_rollout_alone(error: BaseException) -> None:
    async def leaves(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        raise error

    world = World(leaves, Script("abc"))
    world.runner.is_sole_canceller = True
    world.runner.hears_signals = True
    rollout = world.run()
    assert outcome(rollout) == ("failed", "environment")
    assert type(error).__name__ in rollout.outcome.detail
    assert "test_runner.py:" in rollout.outcome.detail


def test_the_end_of_the_loop_passes_through() -> None:
    world = World(one_call, Script("abc", token_s=10.0))

    async def main() -> None:
        task = world.start()
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.runner.running == 0
        assert len(world.gate.reports) == 1

    run_virtual(main())


def test_a_cancellation_reaches_calls_made_from_the_environments_own_tasks() -> None:
    async def grouped(model: Model, ctx: Context) -> Result:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(model.chat("hi"))
            tasks.create_task(asyncio.sleep(1000))
        return Result(1.0)

    world = World(grouped, Script("abcdef", token_s=1.0))
    rollout = world.run((2.5, world.cancel()))
    assert outcome(rollout) == ("cancelled", "stale")
    assert rollout.sampled_tokens == 2
    late = World(grouped, Script("abcdef", token_s=1.0), limits=Limits(deadline_s=2.5))
    rollout = late.run()
    assert outcome(rollout) == ("truncated", "deadline")
    assert rollout.sampled_tokens == 2


# ── segments ──


def test_a_turn_goes_on_after_an_abort_that_nobody_asked_for() -> None:
    engine = Script(reply([5, 6], "abort", 1), reply([], "abort", 2), reply([7, END], "stop", 2))
    rollout = World(one_call, engine, max_tokens=10).run()
    (turn,) = rollout.turns
    assert turn.sampled_ids.tolist() == [5, 6, 7, END]
    assert (turn.versions, turn.segments, turn.finish) == (((1, 2), (2, 2)), 3, "stop")
    assert len(turn.logprobs) == 4
    assert [r.sampling.max_tokens for r in engine.requests] == [10, 8, 8]
    first, _, last = (r.token_ids.tolist() for r in engine.requests)
    assert last == [*first, 5, 6]


def test_what_a_request_told_before_its_engine_failed_counts_for_no_later_request() -> None:
    told: list[int] = []

    def tells_and_fails(request: GenerateRequest) -> Exception:
        assert request.tell is not None
        request.tell([5, 6])
        return EngineUnavailable("engine e0: gone")

    async def rollout(model: Any, ctx: Context) -> Result:
        await model.complete([user("x")], tell=told.extend)
        return Result(1.0)

    world = World(rollout, Script(tells_and_fails, reply([7, 8, 9, END])))
    (turn,) = world.run().turns
    assert turn.sampled_ids.tolist() == [7, 8, 9, END]
    assert told == [5, 6, 7, 8, 9, END]


def test_versions_of_segments_under_one_version_are_one_run() -> None:
    engine = Script(reply([5, 6], "abort", 1), reply([7, END], "stop", 1))
    assert World(one_call, engine).run().turns[0].versions == ((1, 4),)


def test_a_turn_that_is_cut_at_its_last_token_ends_there() -> None:
    engine = Script(reply([5, 6], "abort"), reply([7], "length"))
    rollout = World(one_call, engine, max_tokens=3).run()
    assert outcome(rollout) == ("truncated", "tokens")
    assert rollout.turns[0].finish == "length"


def test_an_engine_that_only_aborts_fails_the_rollout() -> None:
    engine = Script(reply([], "abort"))
    rollout = World(one_call, engine).run()
    assert outcome(rollout) == ("failed", "engine")
    assert len(engine.requests) == EMPTY_ABORTS


def test_an_engine_failure_keeps_the_tokens_of_earlier_segments() -> None:
    engine = Script(reply([5, 6], "abort"), EngineError("engine e0 answered 500"))
    world = World(one_call, engine)
    rollout = world.run()
    assert outcome(rollout) == ("failed", "engine")
    assert rollout.turns[0].sampled_ids.tolist() == [5, 6]
    assert [r.error for r in world.gate.reports] == [None, "engine e0 answered 500"]


def test_an_engine_failure_is_one_even_if_the_environment_catches_it() -> None:
    async def shrugs(model: Model, ctx: Context) -> Result:
        for _ in range(2):
            with pytest.raises(EngineError):
                await model.chat("hi")
        return Result(0.0)

    world = World(shrugs, Script(RuntimeError("broken client")))
    rollout = world.run()
    assert outcome(rollout) == ("failed", "engine")
    assert "RuntimeError: broken client" in rollout.outcome.detail
    assert len(world.engine.requests) == 1


def test_an_engine_that_is_gone_fails_the_rollout() -> None:
    world = World(one_call)
    world.runner._engines = {}
    assert "engine 'e0' is gone" in world.run().outcome.detail


def test_a_stop_string_that_straddles_a_boundary_is_found_at_its_last_token() -> None:
    def ids(text: str) -> list[int]:
        return TOKENIZER.encode(text).tolist()

    engine = Script(
        reply(ids("say </an"), "abort"),
        lambda r: reply(ids("s")[: r.sampling.max_tokens], "length"),
        lambda r: reply(ids("w")[: r.sampling.max_tokens], "length"),
        lambda r: reply(ids("er")[: r.sampling.max_tokens], "length"),
        lambda r: reply(ids("r>x")[: r.sampling.max_tokens], "length"),
        lambda r: reply(ids(">x")[: r.sampling.max_tokens], "length"),
        AssertionError("too many requests"),
    )
    seen = []

    async def look(model: Model, ctx: Context) -> Result:
        seen.append(await model.chat("hi"))
        return Result(1.0)

    rollout = World(look, engine, stop=("</answer>",)).run()
    assert outcome(rollout) == ("completed", None)
    assert (seen[0].text, seen[0].finish) == ("say ", "stop")
    assert TOKENIZER.decode(rollout.turns[0].sampled_ids) == "say </answer>"
    assert [r.sampling.max_tokens for r in engine.requests] == [100, 1, 1, 1, 1, 1]


def test_a_beginning_that_turns_out_to_be_no_stop_string_goes_on_at_full_length() -> None:
    def ids(text: str) -> list[int]:
        return TOKENIZER.encode(text).tolist()

    engine = Script(reply(ids("a <"), "abort"), reply(ids("b"), "length"), reply([*ids("c"), END]))
    rollout = World(one_call, engine, stop=("</answer>",)).run()
    assert TOKENIZER.decode(rollout.turns[0].sampled_ids) == "a <bc"
    assert [r.sampling.max_tokens for r in engine.requests] == [100, 1, 96]
    assert rollout.turns[0].finish == "stop"


def test_a_long_prompt_is_encoded_in_a_thread_and_comes_out_the_same() -> None:
    text = "long " * (LONG_TEXT // 4)

    async def ask(model: Model, ctx: Context) -> Result:
        await model.chat(text)
        await model.chat(text)
        return Result(1.0)

    rollout = World(ask).run()
    assert outcome(rollout) == ("completed", None)
    whole = TOKENIZER.encode(TOKENIZER.render([user(text), assistant("ok"), user(text)]))
    first, second = rollout.turns
    sent = np.concatenate([first.prompt_ids, first.sampled_ids, second.prompt_ids])
    assert np.array_equal(sent, whole)


def test_s24_thinking_that_the_template_strips_makes_a_sample_a_turn_and_trains_each_token_once() -> None:
    strips = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
    world = World(generated([1]), Script("<think>hm</think>ok"))
    key = ("train", "env")
    shared = world.runner._environments[key]

    async def three(model: Model, ctx: Context) -> Result:
        for question in "abc":
            await model.chat(question)
        return Result(1.0)

    thinking = EnvRuntime(
        Calls(three), shared.source, shared.limits, shared.sampling, Bridge(byte_tokenizer(strips))
    )
    world.runner._environments = {key: thinking}
    rollout = world.run()
    built = build_samples(rollout, seq_len=1000, overlong="drop")
    assert len(built.samples) == 3
    assert built.prefix_breaks == 2
    assert sum(int(s.trainable.sum()) for s in built.samples) == rollout.sampled_tokens == 3 * 20


# ── requests ──


def test_a_request_carries_salt_session_seed_and_end_tokens() -> None:
    async def two(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        await model.chat("more")
        return Result(1.0)

    world = World(two, gate=Gate(version=7), temperature=0.6)
    world.run()
    first, second = world.engine.requests
    assert (first.cache_salt, first.session) == ("v7", "g3")
    assert first.request_id != second.request_id
    assert first.sampling.stop_token_ids == (END,)
    assert first.sampling.temperature == 0.6
    assert first.sampling.seed != second.sampling.seed
    assert all(0 <= r.sampling.seed < 2**63 for r in (first, second))  # type: ignore[operator]


@pytest.mark.parametrize("noise_by_position", [True, False])
def test_a_later_segment_keeps_the_seed_only_where_noise_goes_by_position(noise_by_position: bool) -> None:
    engine = Script(reply([5], "abort"), "ok")
    World(one_call, engine, noise_by_position=noise_by_position).run()
    first, second = (r.sampling.seed for r in engine.requests)
    assert (first == second) is noise_by_position


def test_noise_is_the_members_own_and_the_same_in_a_retry() -> None:
    world = World(one_call)

    async def main() -> None:
        for member in (0, 1, 0):
            await world.start(member)

    run_virtual(main())
    a, b, again = (r.sampling.seed for r in world.engine.requests)
    assert a == again != b


def test_the_gate_is_told_what_the_call_needs() -> None:
    world = World(generated([1] * 17), max_tokens=5)
    world.run()
    (event,) = world.gate.requested
    assert (event.context_tokens, event.max_tokens) == (17, 5)


def test_two_model_calls_at_once_are_refused() -> None:
    async def both(model: Model, ctx: Context) -> Result:
        await asyncio.gather(model.chat("a"), model.chat("b"))
        return Result(1.0)

    rollout = World(both, Script("ok", token_s=1.0)).run()
    assert outcome(rollout) == ("failed", "environment")
    assert "one at a time" in rollout.outcome.detail


def test_a_model_call_that_the_environment_gives_up_in_the_engine_can_be_made_again() -> None:
    async def impatient(model: Model, ctx: Context) -> Result:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await model.chat("hi")
        reply = await model.chat("hi again")
        return Result(float(reply.text == "abc"))

    world = World(impatient, Script("abc", token_s=1.0))
    rollout = world.run()
    assert (outcome(rollout), rollout.reward) == (("completed", None), 1.0)
    assert [m.content for m in rollout.messages] == ["hi again", "abc"]
    assert [(r.error, r.given_up) for r in world.gate.reports] == [(None, True), (None, False)]


def test_a_model_call_that_the_environment_gives_up_at_the_gate_is_its_last() -> None:
    async def impatient(model: Model, ctx: Context) -> Result:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await model.chat("hi")
        await model.chat("hi again")
        raise AssertionError

    rollout = World(impatient, gate=Gate(delay=None)).run()
    assert outcome(rollout) == ("failed", "environment")
    assert "turn gate" in rollout.outcome.detail


def test_random_numbers_are_the_members_own_or_the_groups() -> None:
    drawn = []

    async def draw(model: Model, ctx: Context) -> Result:
        drawn.append((ctx.rng.random(), ctx.group_rng.random()))
        await model.chat("hi")
        return Result(1.0)

    world = World(draw)

    async def main() -> None:
        for member in (0, 1, 0):
            await world.start(member)

    run_virtual(main())
    assert drawn[0] == drawn[2]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] == drawn[1][1]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_call_that_the_environment_leaves_behind_is_stopped_before_the_record(deaf: bool) -> None:
    strays = []

    async def leaves(model: Model, ctx: Context) -> Result:
        strays.append(asyncio.get_running_loop().create_task(model.chat("hi")))  # type: ignore[arg-type]
        await ctx.sleep(2.5)
        return Result(1.0)

    rollout = World(leaves, Script("abcdefghijkl", token_s=1.0, deaf=deaf)).run()
    assert outcome(rollout) == ("failed", "environment")
    assert rollout.ended == (7.5 if deaf else 2.5)
    assert rollout.sampled_tokens == (0 if deaf else 2)
    assert strays[0].cancelled()


def test_a_task_that_the_environment_leaves_behind_calls_no_model_after_the_end() -> None:
    strays = []

    async def leaves(model: Model, ctx: Context) -> Result:
        async def later() -> None:
            await ctx.sleep(5)
            await model.chat("again")

        strays.append(asyncio.get_running_loop().create_task(later()))
        reply = await model.chat("hi")
        return Result(float(reply.text == "ok"))

    world = World(leaves)

    async def main() -> Rollout:
        rollout = await world.start()
        await asyncio.wait(strays)
        return rollout

    assert outcome(run_virtual(main())) == ("completed", None)
    assert strays[0].cancelled()
    assert (len(world.gate.requested), len(world.engine.requests)) == (1, 1)


@pytest.mark.parametrize("hides", [False, True])
def test_a_deadline_is_a_truncation_whatever_the_environment_makes_of_it(hides: bool) -> None:
    async def sandboxed(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        try:
            await ctx.sleep(1000)
        except asyncio.CancelledError as error:
            raise RuntimeError("the sandbox was closed") from (None if hides else error)
        raise AssertionError

    async def judged(model: Model, ctx: Context, limit: Any) -> Result:
        return Result(0.25)

    rollout = World(Calls(sandboxed, judged), limits=Limits(deadline_s=10)).run()
    assert (outcome(rollout), rollout.reward) == (("truncated", "deadline"), 0.25)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unweighable:
    def __float__(self) -> float:
        raise RuntimeError("no number")


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (Result(10**400), "int too large"),
        (Result(Unweighable()), "no number"),  # type: ignore[arg-type]
        (Result(1.0, metrics=[1, 2]), "has no attribute 'items'"),  # type: ignore[arg-type]
    ],
)
def test_a_result_that_holds_no_numbers_fails_its_rollout_alone(result: Result, told: str) -> None:
    async def member(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        return result

    rollout = World(member).run()
    assert outcome(rollout) == ("failed", "unscored")
    assert told in rollout.outcome.detail


def test_an_exception_without_a_text_fails_its_rollout_alone() -> None:
    async def member(model: Model, ctx: Context) -> Result:
        raise Speechless

    rollout = World(member).run()
    assert outcome(rollout) == ("failed", "environment")
    assert rollout.outcome.detail == "Speechless (its text raises RuntimeError)"


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("limit", ["patience", True])
def test_a_limit_that_there_is_not_fails_its_rollout_alone(limit: Any, raises: bool) -> None:
    async def member(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        if raises:
            raise RolloutTruncated(limit, "enough")
        return Result(1.0, truncated=limit)

    rollout = World(member).run()
    assert outcome(rollout) == ("failed", "environment")
    assert f"truncated by {limit!r}; expected one of turns, tokens" in rollout.outcome.detail


@pytest.mark.parametrize("swallows", [False, True])
def test_s01_an_environment_that_cancels_its_own_task_ends_one_rollout_only(swallows: bool) -> None:
    async def member(model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as time limits did before tasks could be uncancelled
        if swallows:
            try:
                await ctx.sleep(1)
            except asyncio.CancelledError:
                await asyncio.Event().wait()
        await ctx.sleep(1)
        raise AssertionError

    world = World(member)
    world.runner.is_sole_canceller = True
    rollout = world.run((9.0, world.cancel("stale")))
    assert outcome(rollout) == ("cancelled", "stale" if swallows else "self")
    assert len(rollout.turns) == 1
