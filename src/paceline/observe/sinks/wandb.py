"""Weights & Biases. Offline mode writes everything into the run directory; `wandb sync` uploads it later.

Steps never go back there: every row is logged with its own x-axis (`step`, or `version` for an eval), not with
W&B's step counter, which drops rows that come late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from paceline.observe.rows import Row


class WandbSink:
    """One W&B run."""

    name = "wandb"

    def __init__(
        self,
        run_dir: Path,
        project: str,
        mode: Literal["online", "offline"],
        *,
        name: str,
        config: dict[str, Any],
    ) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            mode=mode,
            dir=str(run_dir),
            name=name or None,
            config=config,
            reinit="create_new",
        )
        self._run.define_metric("step")
        self._run.define_metric("version")
        self._run.define_metric("eval/*", step_metric="version")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        if row.kind == "step":
            self._run.log({"step": row.step, "segment": row.segment, "seconds": row.at, **row.values})
        elif row.kind == "eval":
            self._run.log({"version": row.step, "segment": row.segment, **row.values})

    def close(self) -> None:
        self._run.finish()
