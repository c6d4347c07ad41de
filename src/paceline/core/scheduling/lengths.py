"""How long rollouts will be: learnt from those that ended, those that were cut off, and those that still run.

For each environment, the log of a rollout's sampled tokens is `mean + group + own`, with `group ~ N(0, between)` shared
by its group and `own ~ N(0, within)`; beside that, a share of *runaways* goes to its limit whatever its task. Rollouts
that run, or were cut off, are censored observations: their length is more than what they have (Tobit, Econometrica 26,
1958). The variances are estimated by expectation and maximisation over the latest groups; of a group, the posterior of its effect is normal:
with n lengths known, mean `n·between / (n·between + within) · (their mean - mean)`.

That siblings are alike is what Seer (arXiv:2511.14617) and TailSieve measured; the latter found 72% of the variance
of raw lengths at one checkpoint to be the prompt's.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.domain.commands import NoteLengths
from paceline.domain.ids import EnvName, GroupId

WINDOW: Final = 192
"""Groups that are remembered of an environment, beside those that are open: the policy changes, and old lengths with it."""

REFIT: Final = 24
"""Rollouts that end before the variances are estimated anew, at least."""

_REFIT_SHARE: Final = 1 / 32
"""The same, as a share of the rollouts that are remembered: a fit costs by these."""

_GROWN: Final = math.log(1.1)
"""A rollout that runs must have grown by a tenth to be told again: a little more says nothing new."""

ROUNDS: Final = 3
"""Rounds of expectation and maximisation at each of them; they go on where the last ones stopped."""

ENOUGH: Final = 24
"""Rollouts that must have ended before a prediction counts as one."""

_LEAST: Final = 1e-3
"""Variance below which none is estimated: rollouts of one length are still two a little apart."""

_STANDARD: Final = NormalDist()

_PRIOR: Final = (0.5, 19.5)
"""Beta prior of the share of runaways: one in forty, known as if from twenty rollouts."""


class Prediction(NamedTuple):
    """The distribution of one rollout's length: log-normal, and a share of runaways."""

    mean: float
    """Of the log."""
    deviation: float
    """Of the log: the group's uncertain effect and the rollout's own."""
    runaway: float
    """Share that goes to its limit."""
    limit: float
    """Tokens of a runaway: the longest seen."""
    is_limited: bool = True
    """Whether a runaway was seen. Until then the longest seen is no limit: what runs goes beyond it all the time."""

    def beyond(self, tokens: float) -> float:
        """P(length > tokens)."""
        if tokens < 1:
            return 1.0
        normal = upper_tail((math.log(tokens) - self.mean) / self.deviation)
        stays = 1.0 if tokens < self.limit else 0.0
        return self.runaway * stays + (1 - self.runaway) * normal

    def expected(self, have: float = 0.0) -> float:
        """E[length | length > have], in tokens, at most the limit, if there is one."""
        mean, sd = self.mean, self.deviation
        low = math.log(max(have, 0.5))
        tail = upper_tail((low - mean) / sd)
        if tail < 1e-12:
            normal = have * (
                1 + sd * sd / max(sd, low - mean)
            )  # far out the hazard is (log - mean) / variance
        else:
            normal = math.exp(mean + sd * sd / 2) * upper_tail((low - mean - sd * sd) / sd) / tail
        if not self.is_limited:
            return max(normal, have)
        normal = min(max(normal, have), max(self.limit, have))
        weight = self._runs_away(tail)
        return weight * max(self.limit, have) + (1 - weight) * normal

    def _runs_away(self, tail: float) -> float:
        """P(runaway | longer than what `tail` of the others pass)."""
        return self.runaway / max(self.runaway + (1 - self.runaway) * tail, 1e-300)

    def passed_by(self, share: float, have: float = 0.0) -> float:
        """Tokens that `share` of the rollouts pass which are longer than `have`; at most the limit, if there is one."""
        mean, sd = self.mean, self.deviation
        tail = upper_tail((math.log(max(have, 0.5)) - mean) / sd)
        if self.is_limited:
            weight = self._runs_away(tail)
            if weight >= share:
                return max(self.limit, have)
            share = (share - weight) / (1 - weight)
        far = tail * share
        if far < 1e-12:
            return max(self.limit, have) if self.is_limited else self.expected(have)
        passed = max(have, math.exp(mean - sd * _STANDARD.inv_cdf(far)))
        return min(passed, max(self.limit, have)) if self.is_limited else passed

    def quantile(self, share: float) -> float:
        """Tokens that `share` of the rollouts do not pass."""
        low, high = 0.0, math.log(max(self.limit, 2.0))
        for _ in range(40):
            middle = (low + high) / 2
            if 1 - self.beyond(math.exp(middle)) < share:
                low = middle
            else:
                high = middle
        return math.exp(high)

    def rank(self, tokens: float) -> float:
        """Share of the rollouts that are no runaways and not longer than this."""
        return 1 - upper_tail((math.log(max(tokens, 0.5)) - self.mean) / self.deviation)


class Calibration:
    """How predictions compared with what came."""

    __slots__ = ("inside_90", "inside_half", "judged", "ranks", "runaways", "runaways_expected")

    def __init__(self) -> None:
        self.judged = 0
        """Rollouts that ended by themselves, each compared with what was predicted when it began."""
        self.ranks = 0.0
        self.inside_half = 0
        self.inside_90 = 0
        self.runaways = 0
        self.runaways_expected = 0.0

    def judge(self, prediction: Prediction, tokens: int, is_runaway: bool) -> None:
        self.runaways += is_runaway
        self.runaways_expected += prediction.runaway
        if is_runaway:
            return
        rank = prediction.rank(tokens)
        self.judged += 1
        self.ranks += rank
        self.inside_half += 0.25 <= rank <= 0.75
        self.inside_90 += 0.05 <= rank <= 0.95


class _Group:
    __slots__ = ("ended", "runaways", "running", "stamp")

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}
        """Member -> log of its length; runaways are not in it."""
        self.running: dict[int, float] = {}
        """Member -> log of what it has sampled and passed, for members that run or were cut off."""
        self.runaways = 0
        self.stamp = 0


class EnvLengths:
    """One environment."""

    def __init__(self) -> None:
        self.mean = math.log(512.0)
        self.between = 0.25
        self.within = 0.25
        self.limit = 1.0
        """The longest seen: what a runaway goes to."""
        self.ended = 0
        self.runaways = 0
        self.calibration = Calibration()
        self.version = 0
        """Changes with the parameters, all at once: until then the prediction for a group changes only with what is told of
        its members."""
        self._groups: dict[GroupId, _Group] = {}
        self._open: set[GroupId] = set()
        """Groups that are not forgotten."""
        self._closed: dict[GroupId, None] = {}
        """Those of `_groups` that may be, the one to go first first."""
        self._since = 0
        self._refit = REFIT
        self._runaway, self._limit, self._limited = self.runaway, self.limit, False
        """As they were at the last fit."""
        self._known: dict[GroupId, tuple[int, int, float, float]] = {}

    @property
    def knows(self) -> bool:
        """Whether enough has ended to predict from."""
        return self.ended >= ENOUGH

    @property
    def runaway(self) -> float:
        """Posterior mean of the share of runaways."""
        return (_PRIOR[0] + self.runaways) / (sum(_PRIOR) + self.ended)

    # ── what is told ──

    def opened(self, group: GroupId) -> None:
        """Do not forget this group until it is closed."""
        self._open.add(group)
        self._closed.pop(group, None)

    def closed(self, group: GroupId) -> None:
        """No member of it is to come."""
        if group in self._open:
            self._open.remove(group)
            if group in self._groups:
                self._closed[group] = None

    def running(self, group: GroupId, member: int, tokens: int) -> bool:
        """A member runs and has sampled this much; whether that changes what is predicted of its group."""
        of = self._group(group)
        known = of.running.get(member)
        if tokens < 1 or (known is not None and math.log(tokens) < known + _GROWN):
            return False
        self._passed(of, member, tokens)
        return True

    def cut_off(self, group: GroupId, member: int, tokens: int) -> None:
        """A member was stopped: it would have been longer."""
        if tokens > 0:
            self._passed(self._group(group), member, tokens)

    def _passed(self, of: _Group, member: int, tokens: int) -> None:
        of.running[member] = math.log(tokens)
        of.stamp += 1

    def end(
        self, group: GroupId, member: int, tokens: int, *, is_runaway: bool, returns: bool = False
    ) -> None:
        """A member ended by itself (or at its limit, which makes it a runaway). `returns`: it was cut off before."""
        if tokens < 1:
            return
        if returns and group not in self._groups:
            # The siblings that were on time are forgotten: taken for a group, the late ones would make all look long.
            self._count(tokens, is_runaway)
            return
        of = self._group(group)
        of.running.pop(member, None)
        if self.knows:
            self.calibration.judge(self.predict(group), tokens, is_runaway)
        of.stamp += 1
        self._count(tokens, is_runaway)
        if is_runaway:
            of.runaways += 1
        else:
            of.ended[member] = math.log(tokens)
        self._since += 1
        if self._since >= self._refit or self.ended == ENOUGH:
            self.fit()

    def _count(self, tokens: int, is_runaway: bool) -> None:
        self.ended += 1
        self.runaways += is_runaway
        self.limit = max(self.limit, float(tokens))

    # ── what is answered ──

    def predict(self, group: GroupId | None = None) -> Prediction:
        """The length of a further member of this group, or of any rollout."""
        of = None if group is None else self._groups.get(group)
        if of is None or group is None:
            return self._prediction(0.0, self.between)
        known = self._known.get(group)
        if known is None or known[:2] != (of.stamp, self.version):
            effect, variance = self._posterior(of, 0.0 if known is None else known[2])
            known = self._known[group] = (of.stamp, self.version, effect, variance)
        return self._prediction(known[2], known[3])

    def _prediction(self, effect: float, variance: float) -> Prediction:
        return Prediction(
            self.mean + effect, math.sqrt(self.within + variance), self._runaway, self._limit, self._limited
        )

    def _posterior(self, of: _Group, guess: float) -> tuple[float, float]:
        """Mode and variance of the group's effect: Newton's method on a concave log-density (Laplace), from a guess."""
        sd = math.sqrt(self.within)
        values = list(of.ended.values())
        total = sum(values) - len(values) * self.mean
        if not of.running:
            guess = total * self.between / (len(values) * self.between + self.within)
        effect = guess
        for _ in range(12 if of.running else 1):
            slope = -effect / self.between + (total - len(values) * effect) / self.within
            curve = -1 / self.between - len(values) / self.within
            for passed in of.running.values():
                z = (passed - self.mean - effect) / sd
                hazard = hazard_of(z)
                slope += hazard / sd
                curve -= max(0.0, hazard * (hazard - z)) / self.within
            step = -slope / curve
            effect += max(-1.0, min(1.0, step))
            if abs(step) < 1e-6:
                break
        return effect, -1 / curve

    # ── estimation ──

    def fit(self) -> None:
        """A few rounds of expectation and maximisation over the groups that are remembered."""
        self._since = 0
        self.version += 1
        self._runaway, self._limit, self._limited = self.runaway, self.limit, self.runaways > 0
        groups = [g for g in self._groups.values() if g.ended or g.running]
        exact = sum(len(g.ended) for g in groups)
        if exact < 2:
            return
        index = np.repeat(np.arange(len(groups)), [len(g.ended) + len(g.running) for g in groups])
        values = np.array([v for g in groups for v in (*g.ended.values(), *g.running.values())])
        self._refit = max(REFIT, int(_REFIT_SHARE * len(values)))
        censored = np.array([c for g in groups for c in (*[False] * len(g.ended), *[True] * len(g.running))])
        if self.version == 1:
            self.mean = float(values[~censored].mean())
            self.between = self.within = max(_LEAST, float(values[~censored].var()) / 2)
        for _ in range(ROUNDS if self.version > 1 else 12):
            self._round(index, values, censored, len(groups))

    def _round(
        self,
        index: NDArray[np.intp],
        values: NDArray[np.float64],
        censored: NDArray[np.bool_],
        groups: int,
    ) -> None:
        counts = np.bincount(index, minlength=groups)
        filled, spread = values.copy(), np.zeros(len(values))
        effect = np.zeros(groups)
        variance = 1 / (1 / self.between + counts / self.within)
        for _ in range(2 if censored.any() else 1):
            if censored.any():
                # What a censored one is expected to be, given its group as it is believed to be now.
                at = index[censored]
                sd = np.sqrt(self.within + variance[at])
                centre = self.mean + effect[at]
                z = (values[censored] - centre) / sd
                hazard = np.array([hazard_of(x) for x in z.tolist()])
                filled[censored] = centre + sd * hazard
                spread[censored] = np.maximum(0.0, sd * sd * (1 - hazard * (hazard - z)) - variance[at])
            sums = np.bincount(index, filled - self.mean, minlength=groups)
            effect = variance * sums / self.within
        rest = filled - effect[index]
        self.mean = float(rest.mean())
        self.within = max(_LEAST, float(((rest - self.mean) ** 2 + spread + variance[index]).mean()))
        self.between = max(_LEAST, float((effect**2 + variance).mean()))

    def _group(self, group: GroupId) -> _Group:
        of = self._groups.get(group)
        if of is None:
            of = self._groups[group] = _Group()
            if group not in self._open:
                self._closed[group] = None
            while len(self._closed) > WINDOW:
                old = next(iter(self._closed))
                del self._closed[old], self._groups[old]
                self._known.pop(old, None)
        return of

    def note(self, env: EnvName) -> NoteLengths:
        """All of it in a record for the journal."""
        judged = self.calibration
        n = judged.judged
        predicted = self.predict()
        return NoteLengths(
            env=env,
            ended=self.ended,
            median=math.exp(self.mean),
            deviation=math.sqrt(self.between + self.within),
            group_share=self.between / (self.between + self.within),
            runaways=self.runaway,
            p90=predicted.quantile(0.9),
            judged=n,
            mean_rank=judged.ranks / n if n else None,
            inside_half=judged.inside_half / n if n else None,
            inside_90=judged.inside_90 / n if n else None,
        )

    # ── resuming ──

    def snapshot(self) -> dict[str, float]:
        return {
            "mean": self.mean,
            "between": self.between,
            "within": self.within,
            "limit": self.limit,
            "ended": self.ended,
            "runaways": self.runaways,
            "version": self.version,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.mean, self.between, self.within = state["mean"], state["between"], state["within"]
        self.limit, self.ended, self.runaways = state["limit"], int(state["ended"]), int(state["runaways"])
        self.version = int(state["version"])
        self._runaway, self._limit, self._limited = self.runaway, self.limit, self.runaways > 0


class Lengths:
    """All environments."""

    def __init__(self) -> None:
        self._envs: dict[EnvName, EnvLengths] = {}

    def of(self, env: EnvName) -> EnvLengths:
        known = self._envs.get(env)
        if known is None:
            known = self._envs[env] = EnvLengths()
        return known

    def envs(self) -> dict[EnvName, EnvLengths]:
        return self._envs

    def snapshot(self) -> dict[str, Any]:
        return {env: lengths.snapshot() for env, lengths in self._envs.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for env, saved in state.items():
            self.of(env).restore(saved)


def upper_tail(z: float) -> float:
    """P(a standard normal number > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def hazard_of(z: float) -> float:
    """Density of the standard normal at z over its upper tail: how far beyond z what lies beyond it is, on average."""
    if z > 8.0:
        return z + 1.0 / z - 2.0 / z**3  # the tail's expansion: erfc runs out of digits
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / upper_tail(z)
