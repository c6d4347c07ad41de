"""Which kind of failure an environment's exception is: the same judgement wherever its code runs."""

from __future__ import annotations

import asyncio
from typing import Final

from paceline.domain.rollout import FailureCause
from paceline.envs.protocol import InfrastructureError, RolloutTruncated, ScoringError
from paceline.errors import ModelCallFailed

_PERMANENT: Final = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
"""Errors of the operating system that another attempt would meet again."""


def cause_of(error: BaseException) -> FailureCause:
    """`engine`, `unscored`, `infrastructure` or `environment`.

    `engine` is that of another member's model call, in a group that runs in one call: of its own the runner knows.
    """
    if _is_of_model_call(error):
        return "engine"
    if isinstance(error, BaseExceptionGroup):
        causes = {cause_of(leaf) for leaf in error.exceptions}
        return causes.pop() if len(causes) == 1 else "environment"
    if isinstance(error, ScoringError):
        return "unscored"
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, InfrastructureError):
            return "infrastructure"
        if isinstance(chain, OSError) and not isinstance(chain, _PERMANENT):
            return "infrastructure"
        chain = chain.__cause__  # clients wrap what the network raised
    return "environment"


def _is_of_model_call(error: BaseException) -> bool:
    """Whether it is what a failed model call raised, or was raised while that was handled: `from` or without. What is raised
    `from None`, or from another error, is another matter by the word of whoever raised it."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, BaseExceptionGroup) and any(map(_is_of_model_call, chain.exceptions)):
            return True
        if isinstance(chain, ModelCallFailed):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is what a limit raises in the environment, perhaps inside a group of its own tasks, or what
    the environment made of that: a sandbox client that is interrupted raises an error of its own."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, BaseExceptionGroup) and any(map(is_interruption, chain.exceptions)):
            return True
        if isinstance(chain, RolloutTruncated | asyncio.CancelledError):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
