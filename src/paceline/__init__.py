"""Paceline: the rollout orchestrator of RL post-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.cli.api import run
    from paceline.cli.studies import simulate
    from paceline.tokens.tokenizer import resolve_model_dir as model_dir
    from paceline.transport.reader import publish_weights, read_batches
    from paceline.transport.room import write_with_room

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "model_dir",
    "publish_weights",
    "read_batches",
    "run",
    "simulate",
    "write_with_room",
]

_HOME = {
    "model_dir": ("paceline.tokens.tokenizer", "resolve_model_dir"),
    "publish_weights": ("paceline.transport.reader", "publish_weights"),
    "read_batches": ("paceline.transport.reader", "read_batches"),
    "run": ("paceline.cli.api", "run"),
    "simulate": ("paceline.cli.studies", "simulate"),
    "write_with_room": ("paceline.transport.room", "write_with_room"),
}
"""Public names are imported when they are first asked for: a trainer pays for the reader alone."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)
