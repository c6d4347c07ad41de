"""The reference trainer as a program: batches in, one optimizer step each, weights and acknowledgements out.

    read_batches ─▶ Trainer.step ─▶ publish v(step) ─▶ checkpoint, when due ─▶ acknowledge

It knows a run directory and nothing else of the orchestrator. SIGTERM ends it after the step it is in; so does the end
of the run. Either way it saves, so that a resumed run goes on from here.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from paceline.errors import ConfigError, PacelineError, TrainerError, printable
from paceline.trainer.checkpoint import checkpoint_dir, load_checkpoint, save_checkpoint
from paceline.trainer.loss import LossSettings
from paceline.trainer.probe import probe_prompts, write_probe
from paceline.trainer.step import OptimizerSettings, Trainer
from paceline.trainer.weights import model_directory, write_model
from paceline.transport.reader import discard_unfinished, publish_weights, read_batches
from paceline.transport.room import write_with_room


@dataclass(frozen=True, slots=True)
class Settings:
    """What `--settings` holds, as JSON: the options of the config's `[trainer]`, and what to keep."""

    loss: str = "dppo"
    lr: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    dtype: str = "float32"
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    keep_last: int = 3
    """Checkpoints kept."""
    keep_weights: int = field(default=16)
    """Published versions kept."""

    @classmethod
    def parse(cls, text: str) -> Settings:
        """From JSON. ConfigError as `of` raises it."""
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """ConfigError for a name it does not know: a setting that is ignored would be worse."""
        unknown = sorted(set(given) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"the reference trainer has no setting {', '.join(unknown)}")
        if "betas" in given:
            given = given | {"betas": tuple(given["betas"])}
        return cls(**given)

    def optimizer(self) -> OptimizerSettings:
        loss = LossSettings(self.loss, self.clip_low, self.clip_high, self.kl)  # type: ignore[arg-type]
        return OptimizerSettings(
            self.lr, self.warmup_steps, self.weight_decay, self.betas, self.grad_clip, loss
        )


def train(
    run_dir: Path,
    model: str,
    settings: Settings,
    *,
    rank: int = 0,
    start_version: int = 0,
    is_alone: bool = False,
) -> int:
    """Train until the run ends; returns the last version made. TrainerError or WireError when it cannot go on.

    `is_alone` says that Ctrl-C means this process, as SIGTERM does. Else it reaches the whole terminal, and the run
    decides what it means.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # what is printed is read by people and programs
    source = model_directory(model)
    trainer = Trainer(source, settings.optimizer())
    checkpoints = run_dir / "checkpoints" / "trainer"
    if start_version:
        load_checkpoint(trainer, checkpoint_dir(checkpoints, start_version))
    discard_unfinished(run_dir)
    stopping: list[int] = []
    _listen(stopping, is_alone)
    print(json.dumps({"event": "ready", "version": trainer.version}), flush=True)

    def with_room(what: str, write: Callable[[], object]) -> None:
        def tell(why: str) -> None:
            print(json.dumps({"event": "no room", "for": what, "error": why}), flush=True)

        write_with_room(run_dir, what, write, stop=lambda: bool(stopping), tell=tell)

    saved = trainer.version
    waited_from = time.perf_counter()
    for batch in read_batches(run_dir, rank=rank, start_step=start_version + 1, stop=lambda: bool(stopping)):
        if batch.ranks != 1:
            raise TrainerError(
                f"step {batch.step} was packed for {batch.ranks} ranks, and the reference trainer is one: set "
                "batch.data_parallel = 1"
            )
        began = time.perf_counter()
        metrics = trainer.step(batch.micro_batches)
        stepped = time.perf_counter()
        prompts = probe_prompts(batch.micro_batches)

        def fill(folder: Path, prompts: list[list[int]] = prompts) -> None:
            write_model(trainer.model, source, folder, settings.dtype)
            write_probe(trainer.model, prompts, folder)

        publish = partial(
            publish_weights, run_dir, trainer.version, fill, batch.run_id, keep=settings.keep_weights
        )
        with_room(f"weights v{trainer.version}", publish)
        if trainer.version % settings.checkpoint_every == 0:
            save = partial(save_checkpoint, trainer, checkpoints, settings.keep_last)
            with_room(f"checkpoint v{trainer.version}", save)
            saved = trainer.version
        ended = time.perf_counter()
        metrics |= {
            "wait_s": began - waited_from,
            "step_s": stepped - began,
            "publish_s": ended - stepped,
        }
        with_room(f"acknowledgement of step {batch.step}", partial(batch.ack, metrics))
        told = {"step": batch.step, **{name: round(value, 6) for name, value in metrics.items()}}
        print(json.dumps(told), flush=True)
        waited_from = ended
        if stopping:
            break
    if trainer.version != saved:
        save_checkpoint(trainer, checkpoints, settings.keep_last)
    return trainer.version


def _listen(stopping: list[int], is_alone: bool) -> None:
    def ask(number: int, _frame: object) -> None:
        stopping.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second one does not wait for the step

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask if is_alone else signal.SIG_IGN)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.trainer", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--model", required=True, help="Hugging Face directory (or hub id) of v0")
    parser.add_argument("--settings", type=Settings.parse, default=Settings(), help="JSON, see Settings")
    parser.add_argument("--start-version", type=int, default=0, help="checkpoint to go on from; 0: the model")
    given = parser.parse_args(argv)
    try:
        train(given.run, given.model, given.settings, start_version=given.start_version)
    except PacelineError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
