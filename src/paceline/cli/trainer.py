"""`paceline trainer CONFIG --run RUN`: the reference trainer in a process of its own, for a run that has none.

It takes the config of the run, and trains by its `[trainer]`, `[checkpoint]` and `[scheduling]`, whatever `trainer.type`
says there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from paceline.cli.options import add_config_argument, load_config, require_torch
from paceline.config import ReferenceTrainer, RunConfig
from paceline.errors import ConfigError

TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    parser.usage = f"{parser.prog} CONFIG... --run RUN [--section.key VALUE]..."
    parser.add_argument(
        "--run", type=Path, required=True, metavar="RUN", help="directory of the run that is to be trained"
    )
    parser.add_argument(
        "--start-version",
        type=int,
        metavar="N",
        help="checkpoint to go on from, 0 for the model; the newest of the run when left out",
    )


def run(args: argparse.Namespace) -> int:
    """Train until the run ends, or Ctrl-C or SIGTERM: both after the step under way, having saved."""
    require_torch("trainer")
    args.overrides = ["--trainer.type=reference", *args.overrides]
    config = load_config(args).value
    section = config.trainer
    if not isinstance(section, ReferenceTrainer):
        raise ConfigError(f"`paceline trainer` is the reference trainer, trainer.type is {section.type!r}")
    run_dir: Path = args.run.absolute()
    _refuse_a_second_trainer(run_dir)
    os.environ["OMP_NUM_THREADS"] = str(section.threads)  # before torch is imported
    from paceline.tokens.tokenizer import resolve_model_dir
    from paceline.trainer.loop import Settings, train

    model = resolve_model_dir(config.model.name)
    start = newest_start(run_dir) if args.start_version is None else args.start_version
    print(f"training in {run_dir} from v{start}", file=sys.stderr, flush=True)
    if not run_dir.is_dir():
        print(f"there is no {run_dir} yet: waiting for a run that makes it", file=sys.stderr, flush=True)
    last = train(
        run_dir, str(model), Settings.of(trainer_settings(config)), start_version=start, is_alone=True
    )
    print(f"trained to v{last}", file=sys.stderr, flush=True)
    return 0


def trainer_settings(config: RunConfig) -> dict[str, Any]:
    """What the reference trainer is told of a config; see `paceline.trainer.loop.Settings`."""
    settings = config.trainer.model_dump(exclude={"type", "threads", "start_s", "step_s"})
    return settings | {
        "checkpoint_every": config.checkpoint.every,
        "keep_last": config.checkpoint.keep_last,
        "keep_weights": versions_kept(config),
    }


def versions_kept(config: RunConfig) -> int:
    """Versions an engine may still be told to load, and one for each checkpoint a run may go back to.

    Batches are kept as far back: a trainer trains again what it had not saved.
    """
    return config.checkpoint.every * config.checkpoint.keep_last + config.scheduling.lag + 2


def newest_start(run_dir: Path) -> int:
    """The newest checkpoint of the trainer that the run knows the weights of; 0 when there is none."""
    from paceline.cli.rundir import trainer_steps
    from paceline.transport.layout import WEIGHTS, versions_in

    published = max(versions_in(run_dir / WEIGHTS), default=0)
    return max([step for step in trainer_steps(run_dir) if step <= published], default=0)


def _refuse_a_second_trainer(run_dir: Path) -> None:
    try:
        own = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))["trainer"]["type"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # it has yet to begin
    if own != "external":
        raise ConfigError(
            f"{run_dir} has a trainer of its own (trainer.type = {own!r}), and two would overwrite each other's "
            'weights: start the run with trainer.type = "external"'
        )
