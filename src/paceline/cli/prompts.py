"""The first prompts of an environment, looked at before the run: one that is too long can never train anything."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import EnvSection, EvalSection, RunConfig
from paceline.domain.ids import RolloutId
from paceline.envs.protocol import (
    ChatMessage,
    Context,
    Environment,
    MultiTurnEnv,
    Says,
    SingleTurnEnv,
    TaskSource,
    messages_of,
)
from paceline.errors import said_by
from paceline.runtime.doctor import Finding
from paceline.tokens import ChatTokenizer

_DRAWN = 16
"""Tasks looked at: enough to tell an environment of long prompts from a long task."""
_LOOK_S = 1.0
"""Making a task, or its first prompt, may ask a file or a service."""


def prompt_findings(
    config: RunConfig,
    section: EnvSection | EvalSection,
    environment: Environment,
    source: TaskSource,
    model: Path | None,
) -> list[Finding]:
    """What the first prompts of some of the tasks say. Nothing for an environment that does not tell them beforehand
    (one with a `rollout` of its own, or whose start blocks), for evals, and without the model's directory."""
    if model is None or isinstance(section, EvalSection):
        return []
    tokenizer = ChatTokenizer.load(model, config.model.chat_template)
    lengths: list[int] = []
    until = time.monotonic() + _LOOK_S
    for index in range(min(_DRAWN, source.size or _DRAWN)):
        try:
            made = _first_prompt(environment, index, source.get(index))
        except (Exception, SystemExit) as error:
            return [  # whatever a user's code does, so will each rollout of that task
                Finding(
                    "warning" if isinstance(error, Exception) else "error",
                    f"env {section.label!r}: task {index} has no first prompt",
                    said_by(error),
                    "mend it, or leave the task out: its rollouts fail",
                )
            ]
        if made is None or _is_awaited(made.value):
            return []
        try:
            said = _opening(made)
            lengths.append(len(tokenizer.encode(tokenizer.render(said))))
        except Exception as error:
            return [
                Finding(
                    "error",
                    f"env {section.label!r}: what {made.method}() returns for task {index} cannot be said to the model",
                    said_by(error),
                    f"let it return {made.returns}, in text that UTF-8 can hold",
                )
            ]
        if time.monotonic() > until:
            break
    limit = config.batch.seq_len
    long = [length for length in lengths if length >= limit]
    if not long:
        return []
    span = f"{min(long)}" if min(long) == max(long) else f"{min(long)} to {max(long)}"
    return [
        Finding(
            "error" if len(long) == len(lengths) else "warning",
            f"env {section.label!r}: prompts are as long as a sample may be, so nothing of their answers is trained on",
            f"{len(long)} of the first {len(lengths)} tasks have prompts of {span} tokens; batch.seq_len is {limit}",
            f"raise batch.seq_len above {max(lengths)} plus sampling.max_tokens, or shorten the prompts",
        )
    ]


class _Made(NamedTuple):
    """What an environment's method gave for a task."""

    method: str
    value: Any
    returns: str
    """What is expected of it."""
    system: str | None


def _first_prompt(environment: Environment, index: int, data: Any) -> _Made | None:
    """None where it cannot be told beforehand."""
    kind = type(environment)
    if isinstance(environment, SingleTurnEnv) and kind.rollout is SingleTurnEnv.rollout:
        if inspect.iscoroutinefunction(environment.prompt):
            return None  # it asks a sandbox or a service: that is for the run to do
        return _Made(
            "prompt",
            environment.prompt(data),
            "a text, a message or a list of messages",
            environment.system_prompt,
        )
    if isinstance(environment, MultiTurnEnv) and kind.rollout is MultiTurnEnv.rollout:
        if environment.blocking or inspect.iscoroutinefunction(environment.start):
            return None
        ctx = Context(
            RolloutId(0, 0), group_seed=index, noise_seed=index, deadline=float("inf"), clock=time.monotonic
        )
        expected = "(state, what is said first): a text, a message or a list of messages"
        return _Made("start", environment.start(data, ctx), expected, environment.system_prompt)
    return None


def _is_awaited(value: Any) -> bool:
    """Whether a plain function returned what the run will await."""
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that nobody awaited it
    return inspect.isawaitable(value)


def _opening(made: _Made) -> list[ChatMessage]:
    says: Says
    if made.method == "prompt":
        says = made.value
    else:
        _state, says = made.value
    return [
        *([] if made.system is None else messages_of([{"role": "system", "content": made.system}])),
        *messages_of(says),
    ]
