"""What a rollout comes to, in the words and numbers of its record: of a result, or of what its environment raised."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, get_args

import msgspec
import numpy as np

from paceline.domain.rollout import FailureCause, Limit, Outcome
from paceline.envs.causes import cause_of
from paceline.envs.protocol import Result
from paceline.envs.text import cut_text
from paceline.errors import ModelCallFailed, said_by

LIMITS: Final = get_args(Limit)

MOST_TEXT: Final = 2000
"""Characters of an error's text that a record keeps."""


def as_numbers(result: Result) -> tuple[Result, str]:
    """The result with plain numbers and words, and what is wrong with it, if anything is: what a record may not hold could not be read
    again, nor could those that are stored beside it."""
    # Whatever their hints say: environments are anybody's code.
    role: object = result.role
    trains: object = result.trains
    if not isinstance(role, str):
        return Result(None, info=result.info), f"role is {role!r:.100}; expected a text"
    if not isinstance(trains, bool | np.bool_):
        return Result(None, info=result.info), f"trains is {trains!r:.100}; expected true or false"
    try:
        reward = None if result.reward is None else float(result.reward)
        rewards = {str(k): float(v) for k, v in result.rewards.items()} if result.rewards else {}
        metrics = {str(k): float(v) for k, v in result.metrics.items()} if result.metrics else {}
        turn_rewards = tuple([float(earned) for earned in result.turn_rewards]) if result.turn_rewards else ()
    except Exception as error:
        # Anybody's objects are asked here: an integer too large for a float, no mapping.
        why = f"rewards and metrics must be numbers by name: {text_of(error)}"
        return Result(None, info=result.info), why
    why = ""
    if reward is None:
        why = "the environment gave no reward" if result.trains else ""
    elif not math.isfinite(reward):
        reward, why = None, f"the reward is {reward}"
    made = {
        "rewards": rewards,
        "metrics": metrics,
        "turn_rewards": turn_rewards,
        "trains": bool(result.trains),
    }
    return msgspec.structs.replace(result, reward=reward, **made), why


def by_turn(rewards: tuple[float, ...], turns: int) -> tuple[float, ...] | None:
    """One reward a turn; a turn that was cut short before it was judged earned nothing."""
    return (*rewards, *[0.0] * (turns - len(rewards))) if rewards else None


def no_limit(named: object) -> Outcome:
    """A record with a limit that is none could not be read again, nor could those that are stored beside it."""
    return failed("environment", f"truncated by {named!r}; expected one of {', '.join(LIMITS)}")


def outcome_of(error: BaseException) -> Outcome:
    """Of a rollout whose environment raised `error`, where neither the run nor a limit had ended it."""
    if isinstance(error, asyncio.CancelledError):
        return Outcome("cancelled", "self", "the environment raised CancelledError by itself")
    return failed(cause_of(error), text_of(error))


def failed(cause: FailureCause, detail: str) -> Outcome:
    return Outcome("failed", cause, cut_text(detail, MOST_TEXT))


def text_of(error: BaseException) -> str:
    """What an error of anybody's code says, by type and place."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(text_of, error.exceptions))
    if isinstance(error, ModelCallFailed):
        return str(error)  # as the member has it whose call it was
    return said_by(error)


def storable(info: dict[str, Any]) -> dict[str, Any]:
    """`info`, if a journal can hold it."""
    try:
        msgspec.msgpack.encode(info)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return {"not_stored": f"info is not JSON-like: {error}"}
    return info
