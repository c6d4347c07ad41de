"""What is kept out of training: rollouts that loop, babble or are too long, and rollouts without signal.

Pre-filters look at what a rollout sampled, before any cut. A filter that does not enforce still flags. Post-filters
look at advantages. Both work on whole rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.config.filters import GibberishFilter, LengthFilter, PreFilter, RepetitionFilter
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample


class Flag(msgspec.Struct, frozen=True, gc=False):
    """A filter detected something."""

    filter: str
    reason: str
    enforce: bool


def detect(filters: Sequence[PreFilter], rollout: Rollout) -> tuple[Flag, ...]:
    """What `filters` see in a rollout whose record is sound, in their order."""
    found: list[Flag] = []
    for each in filters:
        if isinstance(each, RepetitionFilter):
            reason = repetition(each, [turn.sampled_ids for turn in rollout.turns])
        elif isinstance(each, GibberishFilter):
            reason = gibberish(each, [turn.logprobs for turn in rollout.turns])
        else:
            reason = length(each, rollout.sampled_tokens)
        if reason is not None:
            found.append(Flag(each.type, reason, each.enforce))
    return tuple(found)


def repetition(rule: RepetitionFilter, sampled: Sequence[NDArray[np.int32]]) -> str | None:
    """A reason when `window` tokens in a row of one turn repeat a period of at most `max_period` tokens.

    A stretch of `window` tokens has period p when its last window - p tokens equal those p earlier. Such a run
    of equal places covers any three neighbours of a grid that is fine enough, so only a few places are compared
    first, all periods at once; the rare candidate is then looked at in full.
    """
    window = rule.window
    if max((len(ids) for ids in sampled), default=0) < window:
        return None
    # A different negative number after each turn: a loop does not go on across turns, since other tokens lie between.
    borders = np.arange(-len(sampled), 0, dtype=np.int32)
    parts: list[NDArray[np.int32]] = []
    for number, ids in enumerate(sampled):
        parts += (ids, borders[number : number + 1])
    tokens = np.concatenate(parts)
    longest = min(rule.max_period, window // 2)
    need = (
        window - longest
    )  # what every such run has at least, from place `longest` on, where the grid starts
    grid = max(1, need // 3)
    places = np.arange(longest, len(tokens), grid)
    periods = np.arange(1, longest + 1)
    hits = tokens[places, None] == tokens[places[:, None] - periods]
    if need >= 3 * grid and len(places) >= 3:
        candidates = (hits[:-2] & hits[1:-1] & hits[2:]).any(axis=0)
    else:
        candidates = hits.any(axis=0)
    for period in periods[candidates]:
        run = _longest_run(tokens[period:] == tokens[:-period])
        if run >= window - period:
            return f"{run + period} tokens in a row repeat a period of {period} (window {window})"
    return None


def gibberish(rule: GibberishFilter, logprobs: Sequence[NDArray[np.float32]]) -> str | None:
    """A reason when the mean logprob of `window` sampled tokens in a row is below the limit.

    A rollout with fewer tokens than the window is judged by all of them.
    """
    lowest_token = min([float(each.min()) for each in logprobs if len(each)], default=0.0)
    if lowest_token >= rule.logprob:  # then so is every mean: most rollouts end here
        return None
    values = np.concatenate(logprobs, dtype=np.float64)
    window = min(rule.window, len(values))
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    lowest = float(np.minimum.reduce(sums[window - 1 :])) / window
    if lowest < rule.logprob:
        return f"{window} tokens in a row have a mean logprob of {lowest:.2f}, below {rule.logprob:g}"
    return None


def length(rule: LengthFilter, sampled_tokens: int) -> str | None:
    """A reason when a rollout sampled too few or too many tokens."""
    if sampled_tokens < rule.min_tokens:
        return f"{sampled_tokens} sampled tokens, fewer than {rule.min_tokens}"
    if rule.max_tokens is not None and sampled_tokens > rule.max_tokens:
        return f"{sampled_tokens} sampled tokens, more than {rule.max_tokens}"
    return None


def has_signal(samples: Sequence[Sample], threshold: float) -> bool:
    """Whether any trainable token's advantage is larger than `threshold`, whatever its sign.

    Compared as float32, which is what the trainer sees: 0.55 - 0.5 is not larger than 0.05.
    """
    limit = np.float32(threshold)
    for sample in samples:
        advantage = sample.advantage
        if isinstance(advantage, np.ndarray):
            if (np.abs(advantage[sample.trainable]) > limit).any():
                return True
        elif abs(np.float32(advantage)) > limit:
            return True
    return False


def _longest_run(equal: NDArray[np.bool_]) -> int:
    breaks = np.flatnonzero(~equal)
    if not len(breaks):
        return len(equal)
    edges = np.concatenate(([-1], breaks, [len(equal)]))
    return int(np.diff(edges).max()) - 1
