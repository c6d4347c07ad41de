"""reasoning-gym's data sets: procedural tasks with a verifier each (github.com/open-thought/reasoning-gym).

[[env]]
id = "reasoning-gym"
args = { dataset = "chain_sum", config = { max_terms = 2, max_digits = 1 } }
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.adapters import needed
from paceline.envs.protocol import Context, Environment, Model, Result, ScoringError, TaskSource
from paceline.errors import ConfigError, said_by

_KEPT = 1024
"""Generated tasks that are kept: the members of a group share theirs."""


class _Numbers:
    """Tasks by number; the tasks themselves are generated when they are rolled out, off the loop."""

    def __init__(self, size: int, fingerprint: str) -> None:
        self.size = size
        self.fingerprint = fingerprint

    def get(self, index: int) -> int:
        return index


class ReasoningGym(Environment):
    """One question, one answer, scored by the data set."""

    def __init__(
        self,
        dataset: str,
        size: int = 10_000,
        eval_size: int = 500,
        seed: int = 0,
        config: Mapping[str, Any] = {},
        system_prompt: str | None = None,
        answer_tag: str | None = None,
        raising_scores: float | None = 0.0,
    ) -> None:
        """`config`: the data set's own parameters. `answer_tag`: what is scored is between `<tag>` and `</tag>`, and
        nothing scores 0. `raising_scores`: what an answer is worth that makes the scorer raise, as some do at junk;
        None leaves it unscored."""
        gym = needed("reasoning_gym", "reasoning-gym")
        self._dataset, self._system_prompt = dataset, system_prompt
        self._raising = raising_scores
        self._pattern = None
        if answer_tag is not None:
            tag = re.escape(answer_tag)
            self._pattern = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL)
        self._print = f"reasoning-gym/{dataset}/{seed}/{sorted(config.items())}"
        # Not the same seeds: task n of a data set is drawn from (seed + n).
        self._sizes: dict[Split, int] = {"train": size, "eval": eval_size}
        try:
            self._sets: dict[Split, Any] = {
                "train": gym.create_dataset(dataset, size=size, seed=seed, **config),
                "eval": gym.create_dataset(dataset, size=eval_size, seed=seed + 500_000_000, **config),
            }
        except Exception as error:  # an unknown name, a parameter it lacks, one that it checks
            raise ConfigError(f"reasoning-gym data set {dataset!r}: {error}") from error
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Split, int], Any] = OrderedDict()

    def tasks(self, split: Split) -> TaskSource:
        return _Numbers(self._sizes[split], f"{self._print}/{split}/{self._sizes[split]}")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        entry = ctx.state = await ctx.in_thread(self._entry, task.ref.split, task.data)
        said: list[dict[str, Any]] = [{"role": "user", "content": entry["question"]}]
        if self._system_prompt is not None:
            said.insert(0, {"role": "system", "content": self._system_prompt})
        reply = await model.chat(said)
        return await ctx.in_thread(self._scored, task.ref.split, entry, reply.text)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        if model.last is None or ctx.state is None:
            return None
        return await ctx.in_thread(self._scored, task.ref.split, ctx.state, model.last.text)

    def _entry(self, split: Split, index: int) -> Any:
        with self._lock:
            found = self._entries.get((split, index))
            if found is None:
                found = self._entries[split, index] = self._sets[split][index]
                if len(self._entries) > _KEPT:
                    self._entries.popitem(last=False)
            return found

    def _scored(self, split: Split, entry: Any, text: str) -> Result:
        answer: str | None = text.strip()
        if self._pattern is not None:
            found = self._pattern.findall(text)
            answer = found[-1].strip() if found else None
        try:
            reward = float(self._sets[split].score_answer(answer, entry)) if answer else 0.0
        except Exception as error:  # its verifiers parse what a model wrote, and some do not expect that
            if self._raising is None:
                raise ScoringError(f"{self._dataset}.score_answer raised {said_by(error)}") from error
            return Result(self._raising, metrics={"scorer_raised": 1.0})
        return Result(reward, info={"question": entry["question"], "answer": str(entry["answer"])})
