"""What a run teaches about its environments and engines, at a constant small cost for each event."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import RolloutId

Array: TypeAlias = NDArray[np.float64]

WAITS: Final = 1024
"""Tool waits kept: enough that the slowest hundredth is still ten of them, or the tail makes the choice flutter."""

MEMORY: Final = 256
"""Rollouts after which what an older one taught counts half, so that a drift in length is followed."""

WINDOWS: Final = 720
"""Windows after which what an older one taught about speed counts half: about an hour."""

PRIOR: Final = 0.01
"""Weight of the guess, as a share of what is known."""

WINDOW_WEIGHT: Final = 1.0
"""Weight of a window against all its segments."""


class Profile(msgspec.Struct, frozen=True):
    """A rollout as the model sees it. Tokens, seconds and turns are means."""

    turns: float
    first: float
    """Context of the first turn."""
    final: float
    """Context of the last turn, with what it sampled."""
    context: float
    """Context of a turn, over all turns of all rollouts: the longer a rollout, the more it counts."""
    sd: float
    """Standard deviation of the same."""
    sampled: float
    """Tokens sampled in a turn."""
    sampled_sq: float
    """Mean of their square."""
    observed: float
    """Tokens a later turn's prompt adds."""
    outside_s: float
    """Seconds a turn's share of its rollout spends outside the engine: tools, set-up, scoring."""
    waits: Array
    """Sorted tool waits between turns, in seconds."""


class EnvStats:
    """Posteriors of one environment."""

    __slots__ = (
        "_context",
        "_context_sq",
        "_ended",
        "_final",
        "_grown",
        "_lasted",
        "_new",
        "_observed",
        "_outside",
        "_reached",
        "_sampled",
        "_sampled_sq",
        "_turns",
        "_waits",
        "durations",
        "ended",
        "seen",
        "waiting",
    )

    def __init__(self) -> None:
        self._reached = np.zeros(64)
        """By turn, from 0: rollouts that began it."""
        self._ended = np.zeros(64)
        """By number of turns: rollouts that ended after so many. Those in flight are in neither: censored."""
        self._context = np.zeros(64)
        self._context_sq = np.zeros(64)
        self._waits: deque[float] = deque(maxlen=WAITS)
        self.waiting: dict[RolloutId, float] = {}
        """When the rollouts whose next turn has not been asked for came back from their last call."""
        self._outside = 0.0
        self._turns = 0.0
        self._sampled = 0.0
        self._sampled_sq = 0.0
        self._final = 0.0
        self._observed = 0.0
        self._new = 0
        self.ended = 0.0
        """Rollouts that ended by themselves, older ones counting less."""
        self.seen = 0
        """Turns begun, ever."""
        self.durations: list[float] = []
        """Seconds of the last rollouts that ended by themselves."""
        self._grown = 0.0
        self._lasted = 0.0

    def asked(self, turn: int, context: int, observed: int, wait_s: float) -> None:
        """A rollout began a turn, numbered from 0, with `observed` new tokens after `wait_s` outside the engine."""
        self._make_room(turn)
        self._reached[turn] += 1.0
        self._context[turn] += context
        self._context_sq[turn] += float(context) * context
        self.seen += 1
        self._outside += wait_s
        if turn:
            self._observed += max(0, observed)
            self._waits.append(wait_s)

    def sampled(self, tokens: int, *, whole: bool) -> None:
        """A segment came back; `whole`: with it the turn is done."""
        self._sampled += tokens
        self._sampled_sq += float(tokens) * tokens
        self._turns += whole

    def _make_room(self, turn: int) -> None:
        """For what is known of a turn: one that went on after a restart may be far beyond those that were seen begin."""
        while turn >= len(self._reached) - 1:
            for name in ("_reached", "_ended", "_context", "_context_sq"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(len(self._reached))]))

    def finished(self, turns: int, first: int, final: int, seconds: float, wait_s: float) -> None:
        """A rollout ended by itself, `wait_s` after its last call."""
        self._make_room(turns)
        self._ended[turns] += 1.0
        self.ended += 1.0
        self._outside += wait_s
        self._final += final
        self._new += 1
        if len(self.durations) >= MEMORY:
            del self.durations[: MEMORY // 4]
        self.durations.append(seconds)
        self._grown += final - first
        self._lasted += seconds

    def fade(self) -> None:
        """Let older rollouts count less."""
        if self._new < MEMORY // 16:
            return
        keep = 0.5 ** (self._new / MEMORY)
        self._new = 0
        for array in (self._reached, self._ended, self._context, self._context_sq):
            array *= keep
        for name in (
            "_outside",
            "_turns",
            "_sampled",
            "_sampled_sq",
            "_final",
            "_observed",
            "_grown",
            "_lasted",
            "ended",
        ):
            setattr(self, name, getattr(self, name) * keep)

    @property
    def growth(self) -> float:
        """Tokens of context a second that a rollout grows by."""
        return self._grown / self._lasted if self._lasted else 0.0

    @property
    def per_turn(self) -> float:
        """Tokens sampled in a turn."""
        return self._sampled / max(1.0, self._turns)

    @property
    def prompt_tokens(self) -> float:
        """Of later turns, all together."""
        return float(self._context[1:].sum())

    @property
    def new_tokens(self) -> float:
        """Of those, what was not there at the end of the turn before."""
        return self._observed

    @property
    def first(self) -> float:
        """Context of a first turn."""
        return float(self._context[0] / max(1e-9, self._reached[0]))

    def profile(self, longest: float, now: float) -> Profile:
        """The posterior means. `longest`: tokens of the longest context, at which a rollout ends at the latest."""
        reached = self._reached
        waits, slower_s = self._waits_by(now)
        # Turns that follow each other from the first: one that went on after a restart may be far beyond them.
        known = int(np.argmin(np.append(reached > 0.5, False))) or 1
        context = self._context[:known] / np.maximum(reached[:known], 1e-9)
        variance = np.maximum(self._context_sq[:known] / np.maximum(reached[:known], 1e-9) - context**2, 0.0)
        sampled = self._sampled / max(1.0, self._turns)
        steps = np.maximum(np.diff(context), 0.0)
        weight = reached[1:known]
        growth = float(np.average(steps, weights=weight)) if weight.sum() > 0 else sampled
        growth = max(growth, sampled, 1.0)
        # Nobody has been seen beyond `known` turns: they go on as before, up to the longest context.
        more = max(0, min(4 * known + 16, int((longest - context[-1]) / growth) + 1))
        tail = np.minimum(context[-1] + growth * np.arange(1, more + 1), longest)
        contexts = np.concatenate([context, tail])
        variances = np.concatenate([variance, np.full(more, variance[-1])])
        survival = np.concatenate([[1.0], np.cumprod(1.0 - self._hazard(len(contexts), growth, longest))])[
            :-1
        ]
        survival[contexts >= longest] *= 0.5
        turns = float(survival.sum())
        shares = survival / turns
        mean = float(shares @ contexts)
        second = float(shares @ (contexts**2 + variances))
        final = (
            self._final / self.ended if self.ended > 4 else min(longest, float(contexts[0] + growth * turns))
        )
        return Profile(
            turns=turns,
            first=float(contexts[0]),
            final=final,
            context=mean,
            sd=float(np.sqrt(max(0.0, second - mean * mean))),
            sampled=max(1.0, sampled),
            sampled_sq=self._sampled_sq / max(1.0, self._turns),
            observed=max(0.0, growth - sampled),
            outside_s=(self._outside + slower_s * float(reached[1:].sum())) / max(1.0, float(reached.sum())),
            waits=waits,
        )

    def _waits_by(self, now: float) -> tuple[Array, float]:
        """Sorted tool waits as likely as each other, and by how much their mean lies above that of those that ended.

        Early in a run the slow tools are those that have not answered yet. Kaplan and Meier: the weight of a wait under
        way goes to those that lasted longer; where none did, it will last as long again as it has. Once the waits that
        are kept are full, those under way are few beside them, and as many were under way when the first of them ended.
        """
        ended = np.sort(np.array(self._waits or [0.0]))
        if not self.waiting or not self._waits or len(self._waits) == WAITS:
            return ended, 0.0
        ages = np.maximum(0.0, now - np.array(list(self.waiting.values())))
        times = np.concatenate([ended, np.where(ages >= ended[-1], 2.0 * ages, ages)])
        over = np.concatenate([np.ones(len(ended), bool), ages >= ended[-1]])
        # Of two at the same time, the one that ended comes first.
        order = np.lexsort((~over, times))
        times, over = times[order], over[order]
        at_risk = np.arange(len(times), 0, -1)
        left = np.cumprod(1.0 - over / at_risk)
        times, left = times[over], left[over]
        ranks = (np.arange(len(times)) + 0.5) / len(times)
        waits: Array = times[np.searchsorted(1.0 - left, ranks - 1e-12).clip(max=len(times) - 1)]
        return waits, max(0.0, float(waits.mean() - ended.mean()))

    def _hazard(self, count: int, growth: float, longest: float) -> Array:
        """P(a rollout ends after its turn j), j from 0: ended over ended and gone on, drawn to the mean over all turns
        where little is known, and that to a rollout that only the longest context ends."""
        ended, went_on = np.zeros(count), np.zeros(count)
        size = min(count, len(self._reached) - 1)
        ended[:size], went_on[:size] = self._ended[1 : size + 1], self._reached[1 : size + 1]
        decided = ended + went_on
        to_longest = max(1.0, (longest - self.first) / growth)
        overall = (ended.sum() + 1.0) / (decided.sum() + to_longest)
        hazard: Array = (ended + 2.0 * overall) / (decided + 2.0)
        return np.clip(hazard, 0.0, 1.0)

    def snapshot(self) -> dict[str, Any]:
        size = int(np.flatnonzero(self._reached > 0.0).max(initial=0)) + 2
        arrays = ("_reached", "_ended", "_context", "_context_sq")
        return {
            **{name: getattr(self, name)[:size].tolist() for name in arrays},
            **{name: getattr(self, name) for name in _SAVED},
            "_waits": list(self._waits)[-WAITS // 4 :],
            "durations": self.durations[-MEMORY // 4 :],
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("_reached", "_ended", "_context", "_context_sq"):
            saved = np.array(state[name], dtype=np.float64)
            setattr(self, name, np.concatenate([saved, np.zeros(64)]))
        for name in _SAVED:
            setattr(self, name, state[name])
        self._waits, self.durations = deque(state["_waits"], WAITS), list(state["durations"])


_SAVED: Final = (
    "_outside",
    "_turns",
    "_sampled",
    "_sampled_sq",
    "_final",
    "_observed",
    "ended",
    "_grown",
    "_lasted",
    "seen",
)


class Speed(msgspec.Struct, frozen=True):
    """Seconds. A step of decode with B calls and K tokens of context takes `fixed + seq * B + token * K`."""

    fixed: float
    seq: float
    token: float
    prefill: float
    """For one prompt token that is not cached."""


_UNITS: Final = np.array([1.0, 1e-2, 1e-6, 1e-3])
"""Of the coefficients, so that they are of one magnitude."""
_A, _B, _C, _D = (float(unit) for unit in _UNITS)


class SpeedFit:
    """Least squares in relative error, over segments and windows of time, of

        seconds = steps · (fixed + seq · B + token · K) + prefill · tokens

    A segment took about as long as its steps with the batch B and contexts K beside it, and the prompt tokens that the
    engine prefilled meanwhile: many rows, which tell the parts of a step apart. But whose prefill slowed whom down
    cannot be seen exactly, and least squares makes light of a cause that is seen inexactly. In a window it need not be
    known: a window counts as much as all its segments.
    """

    __slots__ = ("_matrix", "_per_step", "_right", "_rows", "windows")

    def __init__(self) -> None:
        self._matrix = [0.0] * 10
        self._right = [0.0] * 4
        self._rows = 0
        self._per_step = 0.0
        self.windows = 0.0

    def segment(self, seconds: float, steps: float, batch: float, tokens: float, prefilled: float) -> None:
        """Its seconds and sampled tokens; mean batch and contexts beside it; what was prefilled meanwhile."""
        self._rows += 1
        self._add(1.0 / (seconds * seconds), seconds, steps, batch, tokens, prefilled)

    def window(self, busy_s: float, steps: float, batch: float, tokens: float, prefilled: float) -> None:
        """Seconds the engine was busy, and with what. Older rows count less from here on."""
        keep = 0.5 ** (1.0 / WINDOWS)
        self._matrix = [x * keep for x in self._matrix]
        self._right = [x * keep for x in self._right]
        self.windows = self.windows * keep + 1.0
        self._per_step += (busy_s / steps - self._per_step) / min(self.windows, 50.0)
        weight = WINDOW_WEIGHT * max(1, self._rows)
        self._rows = 0
        self._add(weight / (busy_s * busy_s), busy_s, steps, batch, tokens, prefilled)

    def _add(
        self, w: float, seconds: float, steps: float, batch: float, tokens: float, prefilled: float
    ) -> None:
        a, b, c, d = steps * _A, steps * batch * _B, steps * tokens * _C, prefilled * _D
        m, r = self._matrix, self._right
        wa, wb, wc, wd = w * a, w * b, w * c, w * d
        m[0] += wa * a
        m[1] += wa * b
        m[2] += wa * c
        m[3] += wa * d
        m[4] += wb * b
        m[5] += wb * c
        m[6] += wb * d
        m[7] += wc * c
        m[8] += wc * d
        m[9] += wd * d
        r[0] += wa * seconds
        r[1] += wb * seconds
        r[2] += wc * seconds
        r[3] += wd * seconds

    def solve(self) -> Speed:
        """The fit, none negative. Where the data cannot tell causes apart, the guess decides: half of a step is fixed,
        and 300 prompt tokens cost as much as a step."""
        m = self._matrix
        matrix = np.array(
            [
                [m[0], m[1], m[2], m[3]],
                [m[1], m[4], m[5], m[6]],
                [m[2], m[5], m[7], m[8]],
                [m[3], m[6], m[8], m[9]],
            ]
        )
        ridge = PRIOR * np.diag(matrix) + 1e-12
        guess = self._per_step * np.array([0.5, 0.0, 0.0, 1 / 300]) / _UNITS
        right = np.array(self._right) + ridge * guess
        matrix = matrix + np.diag(ridge)
        free = np.ones(4, dtype=bool)
        found = np.zeros(4)
        for _ in range(4):
            found[:] = 0.0
            found[free] = np.linalg.solve(matrix[np.ix_(free, free)], right[free])
            if (found >= 0.0).all():
                break
            free &= found > 0.0
        fixed, seq, token, prefill = np.maximum(found, 0.0) * _UNITS
        return Speed(float(max(fixed, 1e-9)), float(seq), float(token), float(prefill))

    def snapshot(self) -> dict[str, Any]:
        # Lists are copied: the checkpoint is written while this goes on.
        return {name: deepcopy(getattr(self, name)) for name in self.__slots__}

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.__slots__:
            setattr(self, name, state[name])
