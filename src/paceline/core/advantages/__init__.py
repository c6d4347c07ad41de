"""Rewards become advantages: one file an algorithm. A user's own comes by import path, which a shell resolves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.arguments import misfit
from paceline.config.words import nearest
from paceline.core.advantages.base import (
    Advantages,
    Algorithm,
    AlgorithmError,
    GroupView,
    ServiceRequest,
    centred,
    spread,
)
from paceline.core.advantages.dr_grpo import DrGrpo
from paceline.core.advantages.grpo import Grpo, GrpoStd
from paceline.core.advantages.rloo import Rloo
from paceline.core.advantages.turn_grpo import TurnGrpo
from paceline.errors import ConfigError, said_by

BUILTIN: Mapping[str, type[Algorithm]] = {
    "grpo": Grpo,
    "grpo_std": GrpoStd,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "turn_grpo": TurnGrpo,
}


def builtin(name: str, args: Mapping[str, Any]) -> Algorithm:
    """A built-in algorithm. ConfigError, with the nearest name, for a name or an argument that it does not have."""
    if name not in BUILTIN:
        near = nearest(name, BUILTIN)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"algorithm {name!r} is not built in ({', '.join(BUILTIN)}) and not of the form module:Class{hint}"
        )
    return build(name, BUILTIN[name], args)


def build(name: str, factory: type[Algorithm], args: Mapping[str, Any]) -> Algorithm:
    """Call `factory` with `args`, which its signature must take. ConfigError when it does not, or raises."""
    if problem := misfit(factory, args):
        raise ConfigError(f"algorithm {name!r}: {problem}")
    try:
        made = factory(**args)
    except ConfigError:
        raise
    except Exception as error:  # anybody's code
        raise ConfigError(f"algorithm {name!r} cannot be made with these args: {said_by(error)}") from error
    missing = [part for part in ("requests", "advantages") if not callable(getattr(made, part, None))]
    if missing or not isinstance(made, Algorithm):
        raise ConfigError(
            f"algorithm {name!r} makes a {type(made).__name__}, which has no {', no '.join(missing or ['name'])}: derive it from "
            "paceline.core.advantages.Algorithm"
        )
    return made


__all__ = [
    "BUILTIN",
    "Advantages",
    "Algorithm",
    "AlgorithmError",
    "GroupView",
    "ServiceRequest",
    "build",
    "builtin",
    "centred",
    "spread",
]
