"""What every policy has in common, as one rollout sees it: one call at a time, until the rollout is over.

`ModelCalls` samples on the run's engines, `ChatCalls` asks a chat endpoint. The runner knows only this: what the rollout
waits for, and which of its limits it has met.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.config.environment import Limits
from paceline.config.model import SamplingSection
from paceline.domain.rollout import CancelCause, Limit, Message, Turn
from paceline.envs.protocol import ChatMessage, Environment, Reply, RolloutTruncated, Says, TaskSource
from paceline.errors import EnvError, ModelCallFailed
from paceline.ports import Engine
from paceline.tokens import Bridge

_TOKENS: Final[Limit | None] = "tokens"

Where: TypeAlias = Literal["env", "gate", "engine"]


class PromptTooLong(EnvError):
    """The very first prompt leaves no room for an answer. The task is at fault, so it is not tried again."""


class EnvRuntime(msgspec.Struct, frozen=True):
    """What the rollouts of one environment have in common."""

    environment: Environment
    source: TaskSource
    """The tasks of one split."""
    limits: Limits
    sampling: SamplingSection
    bridge: Bridge | None
    """None where no engine plays."""


class Trajectory(Protocol):
    """The turns of a rollout so far."""

    @property
    def turns(self) -> Sequence[Turn]: ...

    @property
    def sampled_tokens(self) -> int: ...


class Calls(ABC):
    """The `Model` of one rollout: its calls, and where they stand."""

    __slots__ = (
        "_max_context",
        "_poison",
        "_sampling",
        "caller",
        "cut",
        "engine",
        "engine_error",
        "gate_s",
        "last",
        "left",
        "limit",
        "limit_text",
        "limits",
        "model_s",
        "pending",
        "recorder",
        "request_id",
        "serves",
        "stop",
        "where",
    )

    def __init__(self, shared: EnvRuntime, recorder: Trajectory, max_context: int | None) -> None:
        """`max_context`: tokens of a prompt and its answer; None for any number."""
        self.limits = shared.limits
        self._sampling = shared.sampling
        self._max_context = max_context
        self.recorder = recorder
        self._poison = ""
        """Why the environment may make no call any more, where it is at fault."""
        self.last: Reply | None = None
        self.cut: Limit | None = None
        """The limit that cut the latest turn short; None if none did, or one that the environment set itself."""
        self.gate_s = 0.0
        self.model_s = 0.0
        self.caller: asyncio.Task[Any] | None = None
        """The task that makes the call under way; None between calls."""
        self.left: asyncio.Future[None] | None = None
        """Set when the call under way ends, for whoever waits for that."""
        self.serves = False
        """Whether a program is being served: calls are then made for it, and the environment waits for the program."""
        self.where: Where = "env"
        """What the rollout waits for."""
        self.pending: asyncio.Future[Any] | None = None
        """What it waits for there, where that can be cancelled."""
        self.engine: Engine | None = None
        """Whom its request can be taken back from, where there is one."""
        self.request_id = ""
        self.stop: CancelCause | None = None
        """Set by the runner: the rollout is being cancelled, and the next wait ends."""
        self.limit: Limit | None = None
        """The limit that ended the rollout; no call is made after it."""
        self.limit_text = ""
        self.engine_error: str | None = None
        """Why a model call failed; no call is made after it."""

    @abstractmethod
    async def chat(
        self, *says: Says, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply: ...

    @abstractmethod
    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply: ...

    @abstractmethod
    async def generate(
        self, token_ids: Sequence[int] | NDArray[np.int32], *, max_tokens: int | None = None
    ) -> Reply: ...

    @abstractmethod
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, for the record."""

    def park(self) -> None:  # noqa: B027  # most have nothing to do
        """The core wants the engine's place back. Where no engine has places, there is none to give."""

    def end_record(self) -> None:  # noqa: B027
        """The rollout goes on, or ends, from here, if it was begun in an earlier life."""

    def give_out(self, limit: Limit, text: str) -> RolloutTruncated:
        """The rollout ends at `limit`."""
        self.limit = limit
        self.limit_text = text
        return RolloutTruncated(limit, f"the rollout has used up its {text}")

    def _enter(self) -> bool:
        """Whether a call may be made: none while another runs, and none after the rollout is over."""
        if self.caller is not None or self.stop is not None or self.limit is not None:
            return False
        if self.engine_error is not None or self._poison:
            return False
        turns = self.limits.max_turns
        if turns is not None and len(self.recorder.turns) >= turns:
            return False
        self.caller = asyncio.current_task()
        return True

    async def _refuse(self) -> NoReturn:
        if self.caller is not None:
            raise EnvError("a model call is under way: a rollout makes one at a time")
        # Whatever the environment caught, the rollout is over. One that catches this too and calls again must not
        # hold up the loop.
        await asyncio.sleep(0)
        if self.stop is not None:
            raise asyncio.CancelledError
        if self.engine_error is not None:
            raise ModelCallFailed(self.engine_error)
        if self.limit is not None:
            raise RolloutTruncated(self.limit, f"the rollout is over: {self.limit_text}")
        if self._poison:
            raise EnvError(self._poison)
        raise self.give_out("turns", f"{self.limits.max_turns} turns (limits.max_turns)")

    def _leave(self) -> None:
        self.caller = None
        if self.left is not None and not self.left.done():
            self.left.set_result(None)

    def _allowance(self, max_tokens: int | None, context: int) -> tuple[int, Limit | None]:
        """Tokens a call behind `context` tokens may sample, and which limit cuts it there. Raises when there is room for none."""
        allowed, cut = self._sampling.max_tokens, _TOKENS
        if max_tokens is not None and max_tokens < allowed:
            if max_tokens < 1:
                raise EnvError(f"max_tokens is {max_tokens}; a model call samples at least one token")
            allowed, cut = max_tokens, None
        budget = self.limits.max_rollout_tokens
        if budget is not None and (left := budget - self.recorder.sampled_tokens) < allowed:
            allowed, cut = left, "tokens"
        if self._max_context is not None:
            room = self._max_context - context
            if room < allowed:
                allowed, cut = room, "context"
        if allowed >= 1:
            return allowed, cut
        if cut == "tokens":
            raise self.give_out("tokens", f"{budget} sampled tokens (limits.max_rollout_tokens)")
        text = f"prompt of {context} tokens, context of {self._max_context}"
        if not self.recorder.turns:
            raise PromptTooLong(
                f"prompt too long: {text}, which leaves no room for an answer; raise limits.max_context (and the "
                "engine's) or leave the task out"
            )
        raise self.give_out("context", text)
