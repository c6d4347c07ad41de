"""The first prompts of an environment, looked at before the run: one that is too long can never train anything."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

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
            said = _first_prompt(environment, index, source.get(index))
        except Exception as error:  # whatever a user's code does: so will each rollout of that task
            return [
                Finding(
                    "warning",
                    f"env {section.label!r}: task {index} has no first prompt",
                    said_by(error),
                    "mend it, or leave the task out: its rollouts fail",
                )
            ]
        if said is None:
            return []
        lengths.append(len(tokenizer.encode(tokenizer.render(said))))
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


def _first_prompt(environment: Environment, index: int, data: Any) -> list[ChatMessage] | None:
    says: Says
    kind = type(environment)
    if isinstance(environment, SingleTurnEnv) and kind.rollout is SingleTurnEnv.rollout:
        if inspect.iscoroutinefunction(environment.prompt):
            return None  # it asks a sandbox or a service: that is for the run to do
        says = environment.prompt(data)
    elif isinstance(environment, MultiTurnEnv) and kind.rollout is MultiTurnEnv.rollout:
        if environment.blocking or inspect.iscoroutinefunction(environment.start):
            return None
        ctx = Context(
            RolloutId(0, 0), group_seed=index, noise_seed=index, deadline=float("inf"), clock=time.monotonic
        )
        _state, says = environment.start(data, ctx)
    else:
        return None
    system = environment.system_prompt
    return [
        *([] if system is None else messages_of([{"role": "system", "content": system}])),
        *messages_of(says),
    ]
