"""How log lines reach the terminal, where nobody has configured logging."""

from __future__ import annotations

import logging

from paceline.errors import printable


class _Printable(logging.Formatter):
    """Log lines quote servers and environments, too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_printably() -> None:
    """Have records that no handler takes, which Python writes to stderr from warnings on, escaped as errors are. Whoever
    has configured logging has their own handlers, and these are left alone."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
