"""Fits an engine's step to a recorded run: what a step costs by itself, by sequence, by token of context, and a prompt token.

    seconds of a request = sampled · (fixed + sequence · B + token · K) + prefill · (prompt tokens that were not cached)

B and K are the requests of its engine and the tokens of their contexts, on the mean over the request's time. Fitted to half
of the requests, by least squares of the relative error with no constant below nought; the error is that of the others.
With what the engines said of themselves that makes a modelled engine (`recorded_engines`), on which other workloads and
policies can be tried before they are run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.load import EngineInfo
from paceline.errors import ConfigError
from paceline.sim.engine.speed import Speed

Record: TypeAlias = tuple[float, Event, Sequence[Command]]
"""When, what happened, and what was decided: as journals have it."""

LEAST = 40
"""Requests below which nothing can be fitted."""


class Calibration(msgspec.Struct, frozen=True):
    """Constants in seconds, and how well they tell what they were not fitted to."""

    fixed_s: float
    seq_s: float
    token_s: float
    """A token of context, in a step."""
    prefill_s: float
    """A prompt token that was not cached."""
    requests: int
    error: float
    """Mean relative error of a held-out request's seconds."""
    total_error: float
    """Relative error of the held-out requests' seconds in all: what goodput is off by."""

    def speed(
        self, *, kv_tokens: int, max_model_len: int, max_num_seqs: int = 256, max_batched_tokens: int = 8192
    ) -> Speed:
        """A modelled engine with these constants."""
        return Speed(
            kv_tokens=kv_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            weights_s=0.0,
            token_s=self.prefill_s,
            kv_s=self.token_s,
            attention_s=0.0,
            overhead_s=self.fixed_s,
            # A sampled token is computed like one of a prompt, and that is in what a sequence was found to cost.
            seq_s=max(0.0, self.seq_s - self.prefill_s),
        )


class RecordedEngines(msgspec.Struct, frozen=True):
    """The engines of a run, as its journal tells."""

    calibration: Calibration
    count: int
    """How many joined."""
    kv_tokens: int | None
    """Capacity that the first of them told."""
    max_model_len: int | None


def recorded_engines(records: Iterable[Record]) -> RecordedEngines:
    """What engines a run had. ConfigError when the journal holds too few requests to tell what they cost."""
    kept = list(records)
    infos: dict[EngineId, EngineInfo] = {}
    for _, event, _ in kept:
        if isinstance(event, on.EngineJoined):
            infos.setdefault(event.info.id, event.info)
    found = calibrate(kept)
    first = next(iter(infos.values()))
    return RecordedEngines(found, len(infos), first.kv_tokens, first.max_model_len)


class _Open(msgspec.Struct):
    granted: float
    context: int
    batch_before: float
    tokens_before: float


class _Integrals(msgspec.Struct):
    """Requests and tokens of one engine, integrated over time."""

    at: float = 0.0
    running: int = 0
    context: int = 0
    batch: float = 0.0
    tokens: float = 0.0

    def to(self, now: float) -> None:
        self.batch += self.running * (now - self.at)
        self.tokens += self.context * (now - self.at)
        self.at = now


def calibrate(records: Iterable[Record]) -> Calibration:
    """Of all engines of a run together. ConfigError when the journal holds too few requests."""
    rows, seconds = _requests(records)
    if len(rows) < LEAST:
        raise ConfigError(
            f"the journal holds {len(rows)} whole engine requests, and a fit takes {LEAST}: let the run go on"
        )
    design, took = np.array(rows), np.array(seconds)
    even = np.arange(len(took)) % 2 == 0
    found = _non_negative(design[even] / took[even, None], np.ones(int(even.sum())))
    told, real = design[~even] @ found, took[~even]
    fixed_s, seq_s, token_s, prefill_s = map(float, found)
    return Calibration(
        fixed_s,
        seq_s,
        token_s,
        prefill_s,
        requests=len(took),
        error=float(np.mean(np.abs(told / real - 1))),
        total_error=float(told.sum() / real.sum() - 1),
    )


def _requests(
    records: Iterable[Record],
) -> tuple[list[list[float]], list[float]]:
    engines: dict[EngineId, _Integrals] = {}
    asked: dict[RolloutId, int] = {}
    calls: dict[RolloutId, _Open] = {}
    rows: list[list[float]] = []
    seconds: list[float] = []
    for at, event, commands in records:
        if isinstance(event, on.TurnRequested):
            asked[event.rollout] = event.context_tokens
        elif isinstance(event, on.SegmentEnded) and event.rollout in calls:
            call, engine = calls.pop(event.rollout), engines[event.engine]
            engine.to(at)
            engine.running -= 1
            engine.context -= call.context
            sampled, took = sum(n for _, n in event.versions), at - call.granted
            if event.error is None and sampled and took > 0:
                batch = (engine.batch - call.batch_before) / took
                # Contexts grow by what is sampled; half of it on the mean.
                tokens = (engine.tokens - call.tokens_before) / took + batch * sampled / 2
                missed = max(0, call.context - event.cached_tokens)
                rows.append([sampled, sampled * batch, sampled * tokens, missed])
                seconds.append(took)
        for command in commands:
            if isinstance(command, do.GrantTurn):
                engine = engines.setdefault(command.engine, _Integrals(at))
                engine.to(at)
                context = asked.get(command.rollout, 0)
                calls[command.rollout] = _Open(at, context, engine.batch, engine.tokens)
                engine.running += 1
                engine.context += context
    return rows, seconds


def _non_negative(design: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without a negative constant: what would be negative is left out, the worst first."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    used = list(range(design.shape[1]))
    while used:
        part, *_ = np.linalg.lstsq(design[:, used] / scale[used], wanted, rcond=None)
        if part.min() >= 0:
            found = np.zeros(design.shape[1])
            found[used] = part / scale[used]
            return found
        del used[int(part.argmin())]
    return np.zeros(design.shape[1])
