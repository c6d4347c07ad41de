"""`paceline.run`: a whole run from Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.config.load import Loaded

File: TypeAlias = str | PathLike[str]


def run(
    config: RunConfig | File | Sequence[File],
    *,
    resume: File | bool = False,
    plain: bool = True,
    **overrides: Any,
) -> dict[str, Any]:
    """Run to the end, as `paceline run` does; returns the summary that `--summary json` prints.

        summary = paceline.run("run.toml", run={"max_steps": 40}, model={"name": "my-model"})
        summary = paceline.run("run.toml", **{"env.0.group_size": 16, "trainer.lr": 1e-4})

    `config` is a `RunConfig`, a TOML file, or several that are merged in order. Overrides are laid over it: by
    section, or by dotted key. `resume` goes on in the run directory it names; True takes the newest of this name.
    `plain` False shows the live panel.

    Raises ConfigError when the run cannot begin, and whatever ended it early: TrainerError, EngineError,
    NoProgressError. Its directory has the status, the journal and the report all the same. A run that Ctrl-C or
    SIGTERM ended has the status `stopped` in its summary; those are looked after in the main thread alone.
    """
    from paceline.cli.run import check, start

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise PacelineError(
            "paceline.run has an event loop of its own, and one is running here already: call it in a thread, as "
            "`await asyncio.to_thread(paceline.run, config)`"
        )
    loaded = _loaded(config, overrides)
    check(loaded)
    name = ("" if resume else None) if isinstance(resume, bool) else str(resume)
    outcome = start(loaded, resume=name, plain=plain)
    if outcome.error is not None:
        raise outcome.error
    return outcome.summary


def _loaded(config: RunConfig | File | Sequence[File], overrides: Mapping[str, Any]) -> Loaded[RunConfig]:
    from paceline.config import RunConfig
    from paceline.config.dump import dump
    from paceline.config.load import load

    flags = [flag for key, value in overrides.items() for flag in _flags(key, value)]
    if isinstance(config, RunConfig):
        with TemporaryDirectory() as folder:
            file = Path(folder) / "config.toml"
            file.write_text(dump(config), encoding="utf-8")
            return load(RunConfig, [file], flags)
    files = [config] if isinstance(config, str | PathLike) else config
    return load(RunConfig, [Path(file) for file in files], flags)


def _flags(key: str, value: Any) -> Iterator[str]:
    """Overrides as the command line gives them: one reading, one set of errors for both."""
    from paceline.config import RunConfig
    from paceline.config.dump import plain
    from paceline.config.flags import takes_anything
    from paceline.config.shape import Shape
    from paceline.config.toml import toml_value

    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _flags(f"{key}.{inner}", item)
        return
    if value is None:
        text = "None"
    elif takes_anything(RunConfig, key):
        # As a file would have it: a flag's bare text is read as whatever it looks like, "5" as the number.
        text = toml_value(plain(value, Shape(opaque=True)))
    elif isinstance(value, str | PathLike):
        text = str(value)
    else:
        text = toml_value(value)
    yield f"--{key}={text}"
