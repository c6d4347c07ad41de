"""Where numbers go. `metrics.jsonl` in the run directory is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class PrometheusSection(Section):
    """A scrape endpoint (needs the `prometheus` extra)."""

    port: int = Field(default=9464, ge=0, le=65535)
    """Port; 0 takes a free one and prints it."""
    host: str = "127.0.0.1"
    """Address to listen on."""


class WandbSection(Section):
    """Weights & Biases (needs the `wandb` extra)."""

    project: str = "paceline"
    """Project name."""
    mode: Literal["online", "offline"] = "offline"
    """Offline keeps everything in the run directory."""


class TensorboardSection(Section):
    """TensorBoard event files in the run directory (needs the `tensorboard` extra)."""

    subdir: str = "tensorboard"
    """Folder inside the run directory."""


class MetricsSection(Section):
    """Sinks besides the JSONL file. A slow or broken sink drops metrics, never delays the run."""

    prometheus: PrometheusSection | None = None
    """Scrape endpoint; none for none."""
    wandb: WandbSection | None = None
    """Weights & Biases; none for none."""
    tensorboard: TensorboardSection | None = None
    """TensorBoard files; none for none."""
    load_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between readings of the engines' metrics."""
