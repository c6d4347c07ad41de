"""Where rows go besides the screen. Each sink is thin and imported only when it is used.

A sink may raise, hang, or meet a full disk; the run does not notice: see `pump`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.errors import ConfigError
from paceline.observe.sinks.pump import Sink, SinkPump

TOKEN_VARIABLE = "PACELINE_METRICS_TOKEN"
"""Environment variable with the bearer token of a scrape endpoint that is not on loopback."""


class _Prometheus(Protocol):
    @property
    def port(self) -> int: ...
    @property
    def host(self) -> str: ...


class _Wandb(Protocol):
    @property
    def project(self) -> str: ...
    @property
    def mode(self) -> Literal["online", "offline"]: ...


class _Tensorboard(Protocol):
    @property
    def subdir(self) -> str: ...


class SinkChoice(Protocol):
    """The `[metrics]` section of a config."""

    @property
    def prometheus(self) -> _Prometheus | None: ...
    @property
    def wandb(self) -> _Wandb | None: ...
    @property
    def tensorboard(self) -> _Tensorboard | None: ...


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Of names, only `localhost` is known without asking the network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_sinks(
    run_dir: Path,
    choice: SinkChoice,
    *,
    run_name: str = "",
    config: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> list[Sink]:
    """The sinks a config asks for; `metrics.jsonl` always. `say` is told where the scrape endpoint listens.

    Raises ConfigError when a package is missing, or when an endpoint would listen beyond loopback without a token:
    before the run starts, nothing is let slide.
    """
    from paceline.observe.sinks.jsonl import FILE, JsonlSink

    sinks: list[Sink] = [JsonlSink(run_dir / FILE)]
    try:
        if choice.prometheus is not None:
            from paceline.observe.sinks.prometheus import PrometheusSink

            token = os.environ.get(TOKEN_VARIABLE)
            endpoint = PrometheusSink(choice.prometheus.host, choice.prometheus.port, token=token)
            say(f"metrics at {endpoint.url}")
            sinks.append(endpoint)
        if choice.wandb is not None:
            from paceline.observe.sinks.wandb import WandbSink

            sinks.append(
                WandbSink(
                    run_dir, choice.wandb.project, choice.wandb.mode, name=run_name, config=config or {}
                )
            )
        if choice.tensorboard is not None:
            from paceline.observe.sinks.tensorboard import TensorboardSink

            sinks.append(TensorboardSink(run_dir / choice.tensorboard.subdir))
    except ModuleNotFoundError as error:
        extra = {"prometheus_client": "prometheus", "wandb": "wandb", "tensorboardX": "tensorboard"}
        name = (error.name or "").partition(".")[0]
        if name not in extra:
            raise
        raise ConfigError(
            f"metrics.{extra[name]} is set, but {name} is not installed: pip install 'paceline[{extra[name]}]'"
        ) from error
    return sinks


__all__ = ["TOKEN_VARIABLE", "Sink", "SinkChoice", "SinkPump", "is_loopback", "open_sinks"]
