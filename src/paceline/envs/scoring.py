"""Several scorers, one reward: their weighted sum. Those of weight 0 are metrics, which can move nothing and break nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.envs.plain import called, off_loop
from paceline.envs.protocol import Environment, Result, ScoringError
from paceline.errors import said_by


async def weighed(scorers: Mapping[str, tuple[float, Callable[..., Any]]], *args: Any) -> Result:
    """Call each scorer, `{name: (weight, function)}`, with `args`, one after the other; they may be async. Plain
    ones that are methods of the environment run where its `blocking` says, others in threads.

    `rewards` has each one's share of the reward, weight included, and `metrics` what those of weight 0 return. Such a
    one that raises, or whose value is not finite, is left out; `info["scorers_failed"]` says why. Any other that does
    so leaves the rollout unscored: ScoringError, with its name.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, (weight, scorer) in scorers.items():
        try:
            value = float(await _scored(scorer, *args))
            if not math.isfinite(value):
                raise ValueError(f"its value is {value}")
        except Exception as error:
            if weight:
                raise ScoringError(f"scorer {name!r}: {said_by(error)}") from error
            failed[name] = said_by(error)
            continue
        if weight:
            rewards[name] = weight * value
        else:
            metrics[name] = value
    return Result(
        math.fsum(rewards.values()), rewards, metrics, info={"scorers_failed": failed} if failed else {}
    )


async def _scored(scorer: Callable[..., Any], *args: Any) -> Any:
    if isinstance(of := getattr(scorer, "__self__", None), Environment):
        return await called(of, scorer, *args)
    value = scorer(*args) if inspect.iscoroutinefunction(scorer) else await off_loop(scorer, *args)
    return await value if inspect.isawaitable(value) else value
