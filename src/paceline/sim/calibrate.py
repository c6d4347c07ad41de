"""Fits an engine's step to recorded runs: what it costs by itself, by sequence, by token computed, by token of context, and
what a request costs on top.

    seconds of an engine = steps · fixed + sequences · sequence + context · read + again · read again
                           + prefilled · (token + context before it · attention) + came · request

in each of many sums over its time (`sim/requests.py`). `again` is context that several sequences of a step share, which caches of the
processor may make cheaper; it is not in `context` then. Where every sequence of a step costs as much as the longest, `context` is
that (`Speed.pads`): both are fitted, and the one that tells more is taken. By least squares of the relative error with no
constant below nought, to every other sum; the errors are of the rest. A second counts as much as another, however many requests
ran in it. With what the engines said of themselves that makes a modelled engine (`recorded_engines`), on which other workloads
and policies can be tried before they are run.

Loads that differ tell more than one: where the same number of requests always runs, what a step costs by itself cannot be told
from what a sequence does. `docs/simulator.md` names a set of loads that tell all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain import events as on
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo
from paceline.errors import ConfigError
from paceline.sim.engine.speed import Speed
from paceline.sim.fit import non_negative
from paceline.sim.requests import EngineTime, Record, Stretch, engine_time

LEAST = 40
"""Requests below which nothing can be fitted."""
_GENERATIONS, _GROUPS = 2.0, 24
"""How many times all requests under way are answered, in a sum that is fitted; how many sums there are at least."""
_CONTEXT, _AGAIN = 2, 3
"""Columns of `_rows`: context that is read for the first time in a step, and again."""
_SPARE = (5, 6)
"""Those that are left out where the others tell as much: attention, then requests."""
_TOLD = 0.12
"""Share of a column that no mixture of the others makes, above which loads tell what it costs."""
_NO_WORSE = 1.02
"""By how much they may be off more without."""
_SURE = 10.0
"""F above which one more constant is believed: with a hundred sums it is so large by chance once in five hundred fits, with 24,
once in two hundred."""


class Calibration(msgspec.Struct, frozen=True):
    """Constants in seconds, and how well they tell what they were not fitted to."""

    fixed_s: float
    seq_s: float
    """A sequence in a step, with the token of it that is computed."""
    context_s: float
    """A token of context, in a step."""
    again_s: float
    """The same where another sequence of the step has it in the same block. As much, where the loads do not tell."""
    pads: bool
    """Whether each sequence has as many of them as the longest of its step."""
    token_s: float
    """A prompt token, if it is not cached."""
    attention_s: float
    """The same, for each token of context before it."""
    request_s: float
    """Taking a request in and answering it, while nothing is computed."""
    requests: int
    """That ended by themselves."""
    error: float
    """Mean relative error of the seconds of a request, of those that end in sums that were not fitted to; a long one began in one that
    was. The form of which it is less is taken (`pads`)."""
    total_error: float
    """Relative error of all the seconds that were not fitted to: what goodput is off by."""

    @property
    def untold(self) -> list[str]:
        """What was found to cost nothing, as nothing does: the loads could not tell it from the rest."""
        costs = {
            "a step": self.fixed_s,
            "a sequence": self.seq_s - self.token_s,
            "a token of context": self.context_s,
            "a prompt token": self.token_s,
            "a token before it": self.attention_s,
            "a request": self.request_s,
        }
        return [name for name, seconds in costs.items() if seconds <= 0.0]

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
            token_s=self.token_s,
            kv_s=self.context_s,
            kv_again=self.again_s / self.context_s if self.context_s else 1.0,
            pads=self.pads,
            attention_s=self.attention_s,
            overhead_s=self.fixed_s,
            # A sampled token is computed like one of a prompt, and that is in what a sequence was found to cost.
            seq_s=self.seq_s - self.token_s,
            request_s=self.request_s,
        )


class RecordedEngines(msgspec.Struct, frozen=True):
    """The engines of a run, as its journal tells."""

    calibration: Calibration
    count: int
    """How many joined."""
    kv_tokens: int | None
    """Capacity that the first of them told."""
    max_model_len: int | None


def recorded_engines(records: Iterable[Record], max_batched_tokens: int = 8192) -> RecordedEngines:
    """What engines a run had; see `calibrate`. ConfigError when the journal holds too few requests to tell what they cost."""
    kept = list(records)
    infos: dict[EngineId, EngineInfo] = {}
    for _, event, _ in kept:
        if isinstance(event, on.EngineJoined):
            infos.setdefault(event.info.id, event.info)
    if not infos:
        raise ConfigError(
            f"the journal holds {len(kept)} records, and no engine joins in them: give a run that came as far as its engines"
        )
    found = calibrate(kept, max_batched_tokens)
    first = next(iter(infos.values()))
    return RecordedEngines(found, len(infos), first.kv_tokens, first.max_model_len)


def calibrate(records: Iterable[Record], max_batched_tokens: int = 8192) -> Calibration:
    """Of all engines together, of one run or of several, one after the other. `max_batched_tokens`: most tokens of one of their
    steps. ConfigError when they hold too few requests."""
    seen = engine_time(records, max_batched_tokens)
    if len(seen.requests) < LEAST:
        raise ConfigError(
            f"the journal holds {len(seen.requests)} whole engine requests, and a fit takes {LEAST}: let the run go on"
        )
    return min((_fitted(seen, pads) for pads in (False, True)), key=lambda found: found.error)


def _fitted(seen: EngineTime, pads: bool) -> Calibration:
    rows, seconds = _rows(seen.stretches, pads)
    ends_in = sums_of(seen.stretches)
    firsts = np.flatnonzero(np.diff(ends_in, prepend=-1))
    design, took = np.add.reduceat(rows, firsts), np.add.reduceat(seconds, firsts)
    is_fitted = np.arange(len(took)) % 2 == 0
    found = _constants(design[is_fitted], took[is_fitted])
    told = design[~is_fitted] @ found
    # Each stretch is up to the end of the request with its number.
    ends_outside = ends_in % 2 == 1
    rows, seconds = (each[ends_outside] for each in _rows(seen.requests, pads))
    fixed_s, above_s, context_s, again_s, token_s, attention_s, request_s = map(float, found)
    return Calibration(
        fixed_s,
        above_s + token_s,
        context_s,
        again_s,
        pads,
        token_s,
        attention_s,
        request_s,
        requests=len(seen.requests),
        error=float(np.mean(np.abs(rows @ found / seconds - 1))),
        total_error=float(told.sum() / took[~is_fitted].sum() - 1),
    )


def sums_of(stretches: Sequence[Stretch]) -> NDArray[np.intp]:
    """int[N], which of the sums over stretches that follow each other each is in, from 0. What was computed in a short one is
    uncertain, above all whose prefill, and a fit to uncertain rows makes cheap what is uncertain in them; in a sum it evens out."""
    answered = np.cumsum([each.steps / max(each.sequences, 1e-9) for each in stretches])
    width = min(_GENERATIONS, answered[-1] / _GROUPS)
    # The last stretch ends where the last sum does: it is of that one, and makes none by itself.
    last = max(_GROUPS, ceil(answered[-1] / _GENERATIONS)) - 1
    group = np.minimum(np.floor(answered / width), last)
    # Numbered without those in which none ends.
    return np.cumsum(np.diff(group, prepend=group[0]) > 0)


def _constants(design: NDArray[np.float64], took: NDArray[np.float64]) -> NDArray[np.float64]:
    """Context is taken to cost less when it is read again only by loads that tell it, and that are told better so."""
    alike = design.copy()
    alike[:, _CONTEXT] += alike[:, _AGAIN]
    alike[:, _AGAIN] = 0.0
    found = _without_spare(alike, took)
    if _of_its_own(design / np.sqrt(took)[:, None], _AGAIN) > _TOLD:
        apart = _without_spare(design, took)
        better = (_spread(alike @ found, took) / max(1e-9, _spread(design @ apart, took))) ** 2 - 1
        if better * (len(took) - design.shape[1]) > _SURE and apart[_AGAIN] < apart[_CONTEXT]:
            return apart
    found[_AGAIN] = found[_CONTEXT]
    return found


def _without_spare(design: NDArray[np.float64], took: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is spare only where it is needed. Where all prompts are alike, attention, tokens and requests cannot be told from
    each other, and a cost of attention found there would be far too much for longer prompts."""
    found = non_negative(design, took, weight=took)
    scaled = design / np.sqrt(took)[:, None]
    for spare in _SPARE:
        if _of_its_own(scaled, spare) > _TOLD:
            continue
        less = design.copy()
        less[:, spare] = 0.0
        without = non_negative(less, took, weight=took)
        if _spread(less @ without, took) <= _NO_WORSE * _spread(design @ found, took):
            design, found = less, without
    return found


def _of_its_own(rows: NDArray[np.float64], column: int) -> float:
    """Share of a column of float64[N, C] that no mixture of the others makes, 0 to 1."""
    one = rows[:, column]
    others = np.delete(rows, column, axis=1)
    others /= np.maximum(np.abs(others).max(axis=0), 1e-300)
    mixture, *_ = np.linalg.lstsq(others, one, rcond=None)
    return float(np.linalg.norm(one - others @ mixture)) / max(1e-300, float(np.linalg.norm(one)))


def _spread(told: NDArray[np.float64], took: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.average((told / took - 1) ** 2, weights=took)))


def _rows(stretches: Sequence[Stretch], pads: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[N, 7], what was done in each, by what one of it costs; float64[N], its seconds. Each sequence of a step has a token
    computed, so its cost is counted above that."""
    rows = [
        (
            each.steps,
            each.sequences,
            each.padded if pads else each.context - each.again,
            0.0 if pads else each.again,
            each.sequences + each.prefilled,
            each.attended,
            each.came,
        )
        for each in stretches
    ]
    return np.array(rows), np.array([each.seconds for each in stretches])
