"""From a config's `id` and `args` to an environment."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final

from paceline.config.arguments import misfit
from paceline.config.words import nearest
from paceline.domain.task import Split
from paceline.envs.protocol import Environment, TaskSource
from paceline.errors import ConfigError

BUILT_IN: Final[Mapping[str, str]] = {
    "reverse-text": "paceline.envs.builtin.environments:ReverseText",
    "arithmetic": "paceline.envs.builtin.environments:Arithmetic",
    "guess-number": "paceline.envs.builtin.environments:GuessNumber",
    "store-search": "paceline.envs.builtin.store_search:StoreSearch",
    "data": "paceline.envs.adapters.data:PromptAnswerData",
    "reasoning-gym": "paceline.envs.adapters.reasoning_gym:ReasoningGym",
    "textarena": "paceline.envs.adapters.text_arena:TextArena",
    "textarena-selfplay": "paceline.envs.adapters.text_arena:TextArenaSelfPlay",
    "verifiers": "paceline.envs.adapters.verifiers_v1:Verifiers",
    "openenv": "paceline.envs.adapters.openenv:OpenEnv",
}
"""Environments that come with Paceline, by the name a config gives."""


def environment_class(env_id: str) -> type[Environment]:
    """The class of a built-in name or of `module:Class`. ConfigError names what is missing."""
    path = BUILT_IN.get(env_id, env_id)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        hint = nearest(env_id, BUILT_IN)
        raise ConfigError(
            f"environment {env_id!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form module:Class"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    module = _module(env_id, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Environment)]
        hint = nearest(class_name, classes)
        raise ConfigError(
            f"environment {env_id!r}: module {module_name} has no {class_name!r}"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(
            f"environment {env_id!r} is {found!r}; expected a subclass of paceline.envs.Environment"
        )
    return found


def make_environment(env_id: str, args: Mapping[str, Any]) -> Environment:
    """An environment, with the config's arguments. ConfigError names an argument that does not fit."""
    made = environment_class(env_id)
    problem = misfit(made, args)
    if problem:
        raise ConfigError(f"environment {env_id!r}: {problem}")
    try:
        return made(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {env_id!r} refuses its args: {error}") from error
    except (Exception, SystemExit) as error:  # whatever a user's constructor does: open files, ask a service
        raise ConfigError(
            f"environment {env_id!r} cannot be made: its constructor raised {type(error).__name__}: {error}"
        ) from error


def tasks_of(environment: Environment, split: Split, label: str) -> TaskSource:
    """The tasks of a split. ConfigError when there are none, or a resumed run could not know them again."""
    try:
        source = environment.tasks(split)
    except NotImplementedError as error:
        raise ConfigError(f"env {label!r} has no {split} tasks: {error}") from error
    except (Exception, SystemExit) as error:  # whatever a user's code does
        raise ConfigError(
            f"env {label!r}: tasks({split!r}) raised {type(error).__name__}: {error}"
        ) from error
    if problem := _no_source(source):
        raise ConfigError(f"env {label!r}: tasks({split!r}) returned {problem}")
    if source.size == 0:
        raise ConfigError(f"env {label!r} has no {split} tasks: look at its args")
    try:
        fingerprint = source.fingerprint
    except TypeError as error:
        raise ConfigError(
            f"env {label!r}: its {split} tasks cannot be told from others, for they are not JSON-like ({error}): "
            "make them of texts, numbers, lists, dicts or msgspec structs, or give ListTasks a fingerprint"
        ) from error
    except (Exception, SystemExit) as error:  # a source of the user's own
        raise ConfigError(
            f"env {label!r}: the fingerprint of its {split} tasks raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(fingerprint, str):
        raise ConfigError(
            f"env {label!r}: the fingerprint of its {split} tasks is {fingerprint!r}; expected a text"
        )
    return source


def _no_source(returned: Any) -> str:
    """What is wrong with something that should be a `TaskSource`, and what to do; empty if nothing is."""
    name = type(returned).__name__
    if returned is None:
        return "None: it lacks its `return ListTasks([...])`"
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns that nobody awaited it
        return f"a {name}: make it a plain method, without `async`"
    if not callable(getattr(returned, "get", None)) or not hasattr(returned, "size"):
        wrap = (
            "wrap it: ListTasks(list(...))" if isinstance(returned, Iterable) else "return ListTasks([...])"
        )
        return f"a {name}, which is no source of tasks: {wrap}, or give it `size`, `fingerprint` and `get(index)`"
    size = returned.size
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        return f"a {name} whose size is {size!r}: expected a number of tasks, or None for endless"
    return ""


def _module(env_id: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigError(
                f"environment {env_id!r}: no module {name!r}; install it, or start where it lies"
            ) from error
        raise ConfigError(
            f"environment {env_id!r}: importing {name} needs {missing!r}: install it"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's module does while it is imported
        raise ConfigError(
            f"environment {env_id!r}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error
