"""Whether a class takes the arguments that a config has for it, in words for whoever wrote the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from paceline.config.words import nearest


def misfit(made: Callable[..., Any], args: Mapping[str, Any]) -> str:
    """What keeps `made` from being called with `args`, by its signature; empty if nothing does."""
    parameters = {} if _takes_nothing(made) else dict(inspect.signature(made).parameters)
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in args:
        if name not in named and not takes_any:
            hint = nearest(name, named)
            known = ", ".join(named) or "none"
            return f"no argument {name!r} (it takes: {known})" + (f"; did you mean {hint!r}?" if hint else "")
    lacking = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in args]
    return f"args.{lacking[0]} is required" if lacking else ""


def _takes_nothing(made: Any) -> bool:
    """A class without a constructor of its own, whose signature claims to take anything."""
    init = getattr(made, "__init__", None)
    return inspect.isclass(made) and (
        init is object.__init__ or getattr(init, "__module__", "") == "typing"  # a protocol's
    )
