"""`--resume` under another config: what changed and what that means, or why it cannot go on. See `docs/recovery.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cli.rundir import CONFIG_FILE
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.errors import ConfigError, PacelineError
from paceline.tokens.tokenizer import resolve_model_dir

_ABSENT = "absent"
_SAME_MODEL = ("config.json", "tokenizer.json")
"""Files of a model's directory that make its weights and tokens what they are."""
_SILENT = frozenset({"run.name", "run.dir"})
"""Where the run lies; it may have been moved."""

# The longest that begins an option's name counts.
_MEANS = {
    "run.seed": "tasks, seeds and noise are drawn from it from here on: the run no longer repeats from one seed",
    "run.max_steps": "the run ends there",
    "run.deterministic": "steps from here on; whether the run repeats as a whole, it can no longer tell",
    "sampling": "rollouts that start from here on; what was sampled before still trains",
    "env": "rollouts and groups that start from here on",
    "env.group_size": "groups that open from here on; open ones keep the size they began with",
    "eval": "evals from here on; earlier ones are not measured again, so do not compare over the change unchecked",
    "batch": "batches that are cut from here on; one that was cut is shipped as it was",
    "algorithm": "groups that are processed from here on; advantages that were computed stay",
    "filters": "groups that are processed from here on",
    "scheduling": "decisions from here on",
    "admission": "decisions from here on",
    "trainer": "the trainer goes on from its checkpoint with it",
    "engine": "engines are started, or reached, with it",
    "checkpoint": "checkpoints from here on",
    "journal": "records from here on",
    "metrics": "what is written from here on",
}
_ELSE = "from here on"


class Change(NamedTuple):
    """One option that is not what it was."""

    option: str
    """As in the config, environments by name: `env.NAME.group_size`."""
    before: Any
    now: Any
    means: str

    def __str__(self) -> str:
        return f"changed: {self.option} was {_text(self.before)}, is {_text(self.now)}: {self.means}"


def changes_since(run_dir: Path, now: RunConfig) -> list[Change]:
    """What is not as in the config that the run was begun, or last resumed, with.

    ConfigError when it cannot go on under it, or the earlier config cannot be read.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return []
    try:
        before = load(RunConfig, [path]).value
    except PacelineError as error:
        raise ConfigError(
            f"--resume: {path}, the config of the run's earlier life, cannot be read, so what changed cannot be told: "
            f"{error}; mend it, or move it aside to go on unchecked"
        ) from error
    _refuse(run_dir, before, now)
    return list(_compared(before, now))


def _refuse(run_dir: Path, before: RunConfig, now: RunConfig) -> None:
    if before.model.name != now.model.name and not _same_model(before.model.name, now.model.name):
        raise ConfigError(
            f"--resume: model.name was {before.model.name!r} in {run_dir} and is {now.model.name!r}: its weights and "
            "recorded tokens are the earlier model's; put it back, or start a run of its own without --resume"
        )
    for section in ("env", "eval"):
        ids = {env.label: env.id for env in getattr(before, section)}
        for env in getattr(now, section):
            if (known := ids.get(env.label, env.id)) != env.id:
                raise ConfigError(
                    f"--resume: {section} {env.label!r} was environment {known!r} in {run_dir} and is {env.id!r}: its "
                    "open groups and what was learnt of its tasks are the earlier one's; give the new one a name of its "
                    f"own ({section}.name), or put {known!r} back"
                )


def _same_model(before: str, now: str) -> bool:
    """Whether it is the same model in another place."""
    try:
        places = [Path(resolve_model_dir(name)) for name in (before, now)]
        return all(len({(place / name).read_bytes() for place in places}) == 1 for name in _SAME_MODEL)
    except (PacelineError, OSError):
        return False


def _compared(before: RunConfig, now: RunConfig) -> Iterator[Change]:
    old, new = dict(_options(before)), dict(_options(now))
    known = [{name.rpartition(".")[0] for name in options} for options in (old, new)]
    told: set[str] = set()
    for option in dict.fromkeys((*old, *new)):
        was, is_ = old.get(option, _ABSENT), new.get(option, _ABSENT)
        if was == is_ or option in _SILENT:
            continue
        section, label = (*option.split("."), "")[:2]
        whole = f"{section}.{label}"
        if section in ("env", "eval") and any(not any(k.startswith(whole) for k in each) for each in known):
            if whole not in told:
                told.add(whole)
                gone = option not in new
                means = "its open groups are dropped" if gone else "its tasks are drawn from here on"
                yield Change(whole, "there" if gone else _ABSENT, _ABSENT if gone else "there", means)
            continue
        yield Change(option, was, is_, _meaning(option))


def _options(config: RunConfig) -> Iterator[tuple[str, Any]]:
    tree = config.model_dump(mode="json")
    for section in ("env", "eval"):
        labels = [env.label for env in getattr(config, section)]
        tree[section] = dict(zip(labels, tree[section], strict=True))
    yield from _leaves(tree, "")


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{at}.{name}" if at else str(name))
    else:
        yield at, value


def _meaning(option: str) -> str:
    parts = option.split(".")
    if parts[0] in ("env", "eval"):
        del parts[1]  # its name
    for length in range(len(parts), 0, -1):
        if (means := _MEANS.get(".".join(parts[:length]))) is not None:
            return means
    return _ELSE


def _text(value: Any) -> str:
    return value if value in (_ABSENT, "there") else json.dumps(value, ensure_ascii=False)
