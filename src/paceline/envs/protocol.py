"""What an environment is: tasks, and one async method that carries out a rollout.

    class Echo(Environment):
        def tasks(self, split):
            return ListTasks([{"say": "a"}, {"say": "b"}])

        async def rollout(self, task, model, ctx):
            reply = await model.chat(f"Say {task.data['say']}")
            return Result(reward=float(reply.text == task.data["say"]))

`SingleTurnEnv` and `MultiTurnEnv` write the `rollout` of the two common shapes. An environment object serves all
rollouts of its kind at once: keep what belongs to one rollout in local variables or in `ctx.state`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Finish, Limit
from paceline.domain.task import Split, Task
from paceline.envs.plain import Chores, OwnThread, called, off_loop
from paceline.envs.surroundings import InRun, Surroundings
from paceline.errors import EnvError, said_by

ChatMessage: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and whatever else the chat template reads."""

Says: TypeAlias = str | ChatMessage | Sequence[ChatMessage]
"""Something said to the model: a text is one user message."""

State = TypeVar("State")
T = TypeVar("T")


class InfrastructureError(EnvError):
    """What the environment stands on failed (a sandbox, a service): trying again may help.

    Raised by environments. OSError, ConnectionError and TimeoutError are taken the same way.
    """


class ScoringError(EnvError):
    """The reward could not be determined; the rollout is unscored, and neither votes nor trains."""


class RolloutTruncated(EnvError):
    """A model call was refused, or cut short, because a budget of the rollout is used up.

    Raised by `model`. Let it pass: `on_truncated` is then asked for the reward. An environment that catches it may
    return a `Result` itself; the rollout counts as truncated all the same.
    """

    def __init__(self, limit: Limit, text: str) -> None:
        super().__init__(text)
        self.limit: Limit = limit


class Result(msgspec.Struct, frozen=True):
    """How a rollout went, by the environment's judgement."""

    reward: float | None
    """None: not scored; the rollout then neither votes nor trains."""
    rewards: dict[str, float] = {}
    """Named parts of the reward."""
    metrics: dict[str, float] = {}
    """Named numbers that do not move the reward."""
    truncated: Limit | None = None
    """A limit of the environment's own that cut the rollout short; those of the run need not be told."""
    info: dict[str, Any] = {}
    """Small JSON-like facts for people."""
    turn_rewards: tuple[float, ...] = ()
    """The part of the reward that each turn earned, one number a turn, for algorithms that credit turns; empty for a
    reward that belongs to the whole rollout."""
    role: str = ""
    """Which of several agents this rollout was; members are compared with those of their role alone."""
    trains: bool = True
    """False for an agent that is only played against: its rollout is recorded, needs no reward, and neither votes nor
    trains."""


class Reply(msgspec.Struct, frozen=True):
    """What the model said."""

    text: str
    """Without the end token and without a stop string. Unfinished characters appear as U+FFFD."""
    finish: Finish
    """`stop`, or `length` when a token limit cut it; `abort` only for the last reply of an interrupted rollout."""
    token_ids: NDArray[np.int32]
    """Exactly as sampled, end token included."""
    logprobs: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class Model(Protocol):
    """The policy, as a rollout sees it. One call at a time."""

    @property
    def last(self) -> Reply | None:
        """The latest reply, an interrupted one included; None before the first."""
        ...

    async def chat(
        self, *says: Says, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply:
        """Say something more and get the model's answer. Earlier messages and answers are remembered.

        `tools` stays as it was when None. `max_tokens` lowers the run's limit for this call. Raises
        RolloutTruncated when a budget is used up and EngineError when the engine failed; let both pass.
        """
        ...

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Answer a conversation given whole. Goes on in the same sample if it begins with what was said so far,
        else in a new one. Raises as `chat` does."""
        ...

    async def generate(
        self, token_ids: Sequence[int] | NDArray[np.int32], *, max_tokens: int | None = None
    ) -> Reply:
        """Continue exactly these ids. Goes on in the same sample if they begin with the ids so far. A later `chat`
        begins a new conversation. Raises as `chat` does."""
        ...


class Context:
    """What else a rollout has: its randomness, its clock, and a place for its state."""

    __slots__ = (
        "_at_end",
        "_clock",
        "_group_rng",
        "_noise_seed",
        "_rng",
        "deadline",
        "group_seed",
        "rollout",
        "state",
    )

    def __init__(
        self,
        rollout: RolloutId,
        *,
        group_seed: int,
        noise_seed: int,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.rollout = rollout
        self.group_seed = group_seed
        """The same for every member of the group: draw initial states from it."""
        self.deadline = deadline
        """When the rollout is cut, in seconds of the run's clock."""
        self.state: Any = None
        """The environment's own; `on_truncated` finds it here."""
        self._at_end: list[Callable[[], None]] = []
        """Called when the rollout has ended: whether `on_truncated` is asked is known to its runner alone."""
        self._noise_seed = noise_seed
        self._clock = clock
        self._rng: np.random.Generator | None = None
        self._group_rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """This member's own random numbers; the same again in a retry."""
        if self._rng is None:
            self._rng = _generator(self._noise_seed, 1)
        return self._rng

    @property
    def group_rng(self) -> np.random.Generator:
        """Random numbers that every member of the group draws alike."""
        if self._group_rng is None:
            self._group_rng = _generator(self.group_seed, 2)
        return self._group_rng

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - self._clock()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function without holding up other rollouts.

        A thread cannot be interrupted: if the rollout is cancelled, the function runs on and its result is lost.
        """
        return await off_loop(function, *args)


class TaskSource(Protocol):
    """Tasks by position."""

    @property
    def size(self) -> int | None:
        """How many there are; None for endless."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the tasks do, so that a resumed run does not take others for the ones it knew."""
        ...

    def get(self, index: int) -> Any:
        """The data of task `index`: the same each time."""
        ...


class ListTasks:
    """Tasks that are all there."""

    def __init__(self, tasks: Sequence[Any], fingerprint: str | None = None) -> None:
        """Without `fingerprint`, it is a hash over the tasks, which must then be JSON-like (TypeError otherwise)."""
        self._tasks = tasks
        self._fingerprint = fingerprint

    @property
    def is_in_memory(self) -> bool:
        """Whether a task is there at once: a data set of some library may read it from a file."""
        return isinstance(self._tasks, list | tuple | range)

    @property
    def size(self) -> int:
        return len(self._tasks)

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=8)
            for index, task in enumerate(self._tasks):
                try:
                    digest.update(msgspec.json.encode(task))
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    # Half a surrogate pair, or data that holds itself, is no more JSON than an object is.
                    raise TypeError(f"task {index}: {type(error).__name__}: {error}") from error
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def get(self, index: int) -> Any:
        return self._tasks[index]


class EndlessTasks:
    """Tasks that are made when they are asked for."""

    size: None = None

    def __init__(self, make: Callable[[int], Any], fingerprint: str) -> None:
        """`make(index)` returns the same data each time; `fingerprint` names the stream (its seed, its rules)."""
        self.make = make
        self.fingerprint = fingerprint

    def get(self, index: int) -> Any:
        return self.make(index)


class Environment:
    """Base of all environments. Its constructor's arguments are the config's `args`."""

    all_or_nothing: ClassVar[bool] = False
    """True when a reward means something only beside those of the whole group: a group with a member that has no
    score then does not train."""
    whole_group: ClassVar[bool] = False
    """True when the members of a group run together, in one call: they are started together, or not at all."""
    replayable: ClassVar[bool] = False
    """True when `rollout` may be run again over the same answers, after a restart: it does no harm the second time, says
    the same to the model (chance from `ctx` alone) and ends with the same state. See `docs/continuing.md`."""
    blocking: ClassVar[bool | None] = None
    """Where its plain functions run, those without `async`: `score`, `step`, the task source's `get`. None: in a thread of
    the environment's own, one call at a time. True: in threads, side by side. False: on the loop, since they are quick.
    See `docs/guides/environments.md`."""
    _surroundings: Surroundings | None = None

    @property
    def surroundings(self) -> Surroundings:
        """What the run gives it; outside a run, no limits and no services."""
        if self._surroundings is None:
            self._surroundings = InRun()
        return self._surroundings

    @functools.cached_property
    def own_thread(self) -> OwnThread:
        """Where its plain functions take turns."""
        return OwnThread()

    @functools.cached_property
    def chores(self) -> Chores:
        """What it still has to do for rollouts that have ended; done before `close` is called."""
        return Chores()

    def bind(self, surroundings: Surroundings) -> None:
        """Called by the run before the first rollout."""
        self._surroundings = surroundings

    def cold_start(self) -> AbstractAsyncContextManager[None]:
        """`async with self.cold_start(): ...` around setting a sandbox up: waits for `cold_starts` and
        `cold_starts_per_s` of the config, which hold over all workers of the environment."""
        return self.surroundings.cold_start()

    async def ask(self, service: str, request: Any) -> Any:
        """Ask a service of the run: a callable of `[services]`, or the chat endpoint `[chat.NAME]`. A frozen
        opponent, a judge or a simulated user is one. Raises what the service raises."""
        return await self.surroundings.ask(service, request)

    def tasks(self, split: Split) -> TaskSource:
        """The tasks of a split."""
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split)")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        """Carry out one rollout.

        Raise InfrastructureError for what may go better the next time; any other exception is a failure of the
        environment. When the rollout is cancelled or its deadline passes, the pending `await` raises
        CancelledError: clean up in `finally`, and let it pass.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rollout(task, model, ctx)")

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Judge a rollout that a limit cut short, within `score_s` seconds; None leaves it unscored.

        `ctx.state` is as `rollout` left it, and `model.last` what the model said last.
        """
        return None

    async def close(self) -> None:
        """Release what the environment holds. Called once, after its last rollout."""


class SingleTurnEnv(Environment):
    """One question, one answer, one score."""

    replayable = True
    system_prompt: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Known of the course that is written here, and of no other.
        if "rollout" in cls.__dict__ and "replayable" not in cls.__dict__:
            cls.replayable = False

    def prompt(self, data: Any) -> Says:
        """What is asked: a text, or messages; may be async."""
        raise NotImplementedError(f"{type(self).__name__} must define prompt(data)")

    def score(self, data: Any, text: str) -> Any:
        """The reward of an answer, or a whole `Result`; may be async. An exception leaves the rollout unscored."""
        raise NotImplementedError(f"{type(self).__name__} must define score(data, text)")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        says = await called(self, self.prompt, task.data)
        reply = await model.chat(*_opening(self.system_prompt, says))
        return await self._scored(task, reply.text)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Scores what there is of the answer."""
        return None if model.last is None else await self._scored(task, model.last.text)

    async def _scored(self, task: Task, text: str) -> Result:
        try:
            scored = await called(self, self.score, task.data, text)
        except Exception as error:
            raise ScoringError(f"score() raised {said_by(error)}") from error
        return scored if isinstance(scored, Result) else Result(reward=scored)


class Observation(msgspec.Struct, frozen=True):
    """What the world answers to something the model said."""

    says: Says = ()
    """Said to the model next; not used when `done`."""
    done: bool = False
    reward: float = 0.0
    """Added to the rollout's reward."""
    state: Any = msgspec.UNSET
    """The state from here on; left out, it is the same object as before."""
    metrics: dict[str, float] = {}


class MultiTurnEnv(Environment, Generic[State]):
    """A conversation between the model and a state. The reward is the sum over the steps."""

    system_prompt: str | None = None

    def start(self, data: Any, ctx: Context) -> Any:
        """`(state, what is said first)`; may be async. Chance goes by `ctx.group_rng`, so that members start alike."""
        raise NotImplementedError(f"{type(self).__name__} must define start(data, ctx)")

    def step(self, state: State, text: str) -> Any:
        """The `Observation` that follows from what the model said; may be async."""
        raise NotImplementedError(f"{type(self).__name__} must define step(state, text)")

    async def between(self, state: State, ctx: Context) -> None:
        """Awaited before each model call but the first: a place for waiting on tools."""

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        state, says = await called(self, self.start, task.data, ctx)
        progress = ctx.state = _Progress(state)
        reply = await model.chat(*_opening(self.system_prompt, says))
        while True:
            seen = await called(self, self.step, progress.state, reply.text)
            progress.take(seen)
            if seen.done:
                return progress.result()
            await self.between(progress.state, ctx)
            reply = await model.chat(seen.says)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """The rewards of the steps that were taken; unscored if none was."""
        progress = ctx.state
        return progress.result() if isinstance(progress, _Progress) and progress.steps else None


class _Progress:
    """How far a multi-turn rollout has come."""

    __slots__ = ("earned", "metrics", "reward", "state", "steps")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.reward = 0.0
        self.earned: list[float] = []
        self.steps = 0
        self.metrics: dict[str, float] = {}

    def take(self, seen: Any) -> None:
        if not isinstance(seen, Observation):
            raise EnvError(f"step() returned {type(seen).__name__}; expected Observation")
        self.steps += 1
        self.reward += seen.reward
        self.earned.append(seen.reward)
        self.metrics.update(seen.metrics)
        if seen.state is not msgspec.UNSET:
            self.state = seen.state

    def result(self) -> Result:
        earned = tuple(self.earned) if self.steps > 1 else ()
        return Result(reward=self.reward, metrics=self.metrics, turn_rewards=earned)


async def task_data(environment: Environment, source: TaskSource, index: int) -> Any:
    """The data of one task. A source that reads or makes it then is code that may block."""
    kind = type(source)
    if kind.get is EndlessTasks.get and isinstance(source, EndlessTasks):
        return await called(environment, source.make, index)
    if kind.get is ListTasks.get and isinstance(source, ListTasks) and not source.is_in_memory:
        return await called(
            environment, functools.partial(source.get), index
        )  # it is our own function by its looks
    return await called(environment, source.get, index)


def messages_of(says: Says) -> list[ChatMessage]:
    """Messages of whatever is said. EnvError when it is nothing that can be said."""
    if isinstance(says, str):
        return [{"role": "user", "content": says}]
    if isinstance(says, Mapping):
        return [says]
    listed = list(says) if isinstance(says, Iterable) else says
    if not isinstance(listed, list) or not all(isinstance(message, Mapping) for message in listed):
        raise EnvError(f"said {listed!r} to the model; expected a text, a message or a list of messages")
    return listed


def _opening(system_prompt: str | None, says: Says) -> list[ChatMessage]:
    said = messages_of(says)
    return said if system_prompt is None else [{"role": "system", "content": system_prompt}, *said]


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=(purpose << 64) | (seed & (2**64 - 1))))
