"""Which task of an environment next, where that depends on how its groups went. One file an idea.

`shuffled` and `sequential` need no memory and are in `paceline.core.curriculum`; those here learn, and need a finite
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.samplers.band import SuccessBand
from paceline.core.samplers.base import TaskSampler
from paceline.core.samplers.pools import DifficultyPools
from paceline.errors import ConfigError

LEARNING: Mapping[str, type[TaskSampler]] = {"difficulty": DifficultyPools, "band": SuccessBand}


def build_sampler(
    name: str, factory: type[TaskSampler], size: int | None, seed: int, args: Mapping[str, Any]
) -> TaskSampler:
    """A sampler over `size` tasks. ConfigError when the source is endless, or an argument does not fit."""
    if size is None:
        raise ConfigError(
            f"sampler {name!r} remembers how each task went, which an endless source does not allow: use "
            'sampler = "sequential" (or "shuffled", which is the same there), or a finite source'
        )
    try:
        return factory(size, seed, **args)
    except TypeError as error:
        raise ConfigError(f"sampler {name!r} refuses its sampler_args: {error}") from error


__all__ = ["LEARNING", "DifficultyPools", "SuccessBand", "TaskSampler", "build_sampler"]
