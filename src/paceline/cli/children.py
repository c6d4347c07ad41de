"""The trainer as a process of the run, and the end of all of them: engines are stopped, the trainer saves first."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.stopping import TERM_S, Stopping
from paceline.cli.trainer import trainer_settings
from paceline.config import ReferenceTrainer, RunConfig
from paceline.errors import TrainerError
from paceline.runtime.processes import ChildProcess


async def start_trainer(
    config: RunConfig,
    section: ReferenceTrainer,
    run_dir: Path,
    model_dir: Path,
    *,
    version: int,
    inherit: Sequence[int],
) -> ChildProcess:
    """The reference trainer, going on from `version`. TrainerError when it does not come up; `inherit` as in `ChildProcess`."""
    argv = [sys.executable, "-m", "paceline.trainer", "--run", str(run_dir)]
    argv += ["--model", str(model_dir), "--settings", json.dumps(trainer_settings(config))]
    argv += ["--start-version", str(version)]
    return await ChildProcess.start(
        argv,
        name="trainer",
        log_path=run_dir / "logs" / "trainer.log",
        start_s=section.start_s,
        threads=section.threads,
        error=TrainerError,
        may_finish=False,
        inherit=inherit,
    )


async def close_children(children: Sequence[ChildProcess], stopping: Stopping, *, done: bool) -> None:
    """The trainer ends by itself, having saved, once the run's status says so; engines are simply stopped. `done`: the run came
    to its end."""
    stopping.closes()
    if not children:
        return
    save_s = stopping.save_s(done=done)
    closing = asyncio.gather(
        *(c.close(TERM_S, finish_s=save_s if c.name == "trainer" else 0.0) for c in children)
    )
    hurry = asyncio.create_task(stopping.hurry.wait())
    try:
        await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            for child in children:
                child.kill()
        await closing
    finally:
        hurry.cancel()
        await asyncio.wait((hurry,))  # so that no task of ours is left when the loop is asked which are
