"""What a run is worth: numbers of what a `Measure` saw, and of the engines.

A batch counts when the trainer has taken its step. Lengths are sampled tokens. A run that is measured by several seeds has a
`confidence` interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EnvName
from paceline.sim.bound import Bound
from paceline.sim.engine import Endpoint
from paceline.sim.measure import Measure, StepSeen

Lengths = NDArray[np.int64]


class Summary(msgspec.Struct, frozen=True):
    """The numbers of a run, after `skip` steps that are not counted."""

    steps: int
    seconds: float
    """Of the window: from the end of the last step not counted to the end of the last."""
    goodput: float
    """Trained tokens a second."""
    signal_goodput: float
    """The same, of rollouts with an advantage."""
    step_s: float
    """Seconds from step to step."""
    rollout_s: float
    """Mean seconds of the rollouts of a batch: from the first start after the batch before it was cut, to its own cut. Where the run
    overlaps, and they are under way by then, it is the time between two cuts."""
    train_s: float
    """Mean seconds of the trainer for a batch, as it says itself."""
    tail_s: float
    """Mean seconds of the last tenth of a batch's rollouts, by when they ended."""
    mean_length: float
    """Of trained rollouts, in tokens."""
    staleness_mean: float
    staleness_max: int
    versions_max: int
    """Most versions that sampled one trained rollout."""
    mixed_share: float
    """Trained rollouts that more than one version sampled."""
    group_s: float
    """Median seconds from a group's first start to its last end; of the whole run, as the two below."""
    gate_s: float
    """Mean seconds that a rollout waited at the turn gate."""
    wasted_share: float
    """Tokens of attempts that ended and did not train, by those that did; evals and what waits left out."""


def counted_steps(measure: Measure, skip: int = 0) -> list[StepSeen]:
    """Steps that were trained, after the first `skip`, in whole cycles: up to that of the later half at which least was put
    off. What a policy defers, long rollouts mostly, would be missing from a cycle that is cut in two."""
    steps = [seen for seen in measure.steps if seen.trained is not None][skip:]
    if not steps:
        return []
    last = min(range(len(steps) // 2, len(steps)), key=lambda number: (steps[number].put_off, -number))
    return steps[: last + 1]


def summarize(measure: Measure, skip: int = 0, *, overlapped: bool = False) -> Summary | None:
    """None when no step after the first `skip` was trained; see `counted_steps`. `overlapped`: rollouts go on while the trainer works."""
    trained = [seen for seen in measure.steps if seen.trained is not None]
    counted = counted_steps(measure, skip)
    if not counted:
        return None
    since = trained[skip - 1].trained if skip else min(seen.began for seen in trained)
    until = counted[-1].trained
    assert since is not None
    assert until is not None
    seconds = max(1e-9, until - since)
    tokens = sum(seen.tokens for seen in counted)
    stale = [n for seen in counted for n in seen.staleness]
    versions = [n for seen in counted for n in seen.versions]
    lengths = [n for seen in counted for n in seen.lengths]
    cuts = {seen.step: seen.cut for seen in measure.steps} if overlapped else {}
    return Summary(
        steps=len(counted),
        seconds=seconds,
        goodput=tokens / seconds,
        signal_goodput=sum(seen.signal_tokens for seen in counted) / seconds,
        step_s=seconds / len(counted),
        rollout_s=float(np.mean([seen.cut - cuts.get(seen.step - 1, seen.began) for seen in counted])),
        train_s=float(np.mean([seen.train_s for seen in counted])),
        tail_s=float(np.mean([tail_s(seen.ends) for seen in counted])),
        mean_length=float(np.mean(lengths)),
        staleness_mean=float(np.mean(stale)),
        staleness_max=max(stale),
        versions_max=max(versions),
        mixed_share=float(np.mean([n > 1 for n in versions])),
        group_s=float(np.median(measure.latencies)) if measure.latencies else 0.0,
        gate_s=float(np.mean(measure.waits)) if measure.waits else 0.0,
        wasted_share=sum(measure.lost_tokens.values()) / max(1, measure.trained_tokens),
    )


def tail_s(ends: Sequence[float]) -> float:
    """Seconds between the end of nine tenths of a batch and the end of all of it."""
    ordered = sorted(ends)
    return ordered[-1] - ordered[max(0, -(-9 * len(ordered) // 10) - 1)]


def unvisited_share(measure: Measure, counted: Sequence[StepSeen]) -> float:
    """Share of the tasks that were drawn in these steps of which no rollout was trained. Of what is settled by the end of them."""
    since, until = counted[0].began, counted[-1].settled_until
    drawn = {task for task, at in measure.drawn_tasks.items() if since <= at < until}
    trained = {task for seen in measure.steps if seen.step <= counted[-1].step for task in seen.tasks}
    return len(drawn - trained) / len(drawn) if drawn else 0.0


class LengthBias(msgspec.Struct, frozen=True):
    """Lengths that were trained, against those that the policy draws."""

    mean: float
    """Mean length trained by mean length drawn, less 1."""
    cap_share: float
    """Share of the longest (at least `cap`) among the trained."""
    cap_share_drawn: float
    ks: float
    """Largest distance of the two distribution functions (Kolmogorov and Smirnov)."""


def length_bias(
    trained: Sequence[int] | Lengths, drawn: Sequence[int] | Lengths, cap: int | None = None
) -> LengthBias:
    """Over whole cycles of a policy: a single step of one that defers long rollouts is biased by design."""
    a, b = np.sort(np.asarray(trained, np.float64)), np.sort(np.asarray(drawn, np.float64))
    limit = b[-1] if cap is None else cap
    grid = np.concatenate([a, b])
    distance = np.abs(
        np.searchsorted(a, grid, side="right") / len(a) - np.searchsorted(b, grid, side="right") / len(b)
    )
    return LengthBias(
        mean=float(a.mean() / b.mean() - 1),
        cap_share=float((a >= limit).mean()),
        cap_share_drawn=float((b >= limit).mean()),
        ks=float(distance.max()),
    )


def length_biases(
    counted: Sequence[StepSeen], drawn: Mapping[EnvName, Sequence[int] | Lengths]
) -> dict[EnvName, tuple[int, LengthBias]]:
    """Of each environment that trained, whose lengths are its own: how many of its rollouts, and their bias. `drawn` has lengths of what
    these steps drew, up to the moment by which all is settled (`StepSeen.settled_until` of the last); only these are compared."""
    since, until = counted[0].began, counted[-1].settled_until
    trained: dict[EnvName, list[int]] = {}
    for seen in counted:
        for length, env, at in zip(seen.lengths, seen.envs, seen.drawn, strict=True):
            if since <= at < until:
                trained.setdefault(env, []).append(length)
    return {
        env: (len(trained[env]), length_bias(trained[env], lengths))
        for env, lengths in drawn.items()
        if len(lengths) and env in trained
    }


class Gaps(msgspec.Struct, frozen=True):
    """By how much more than the lower bound a run took, as a share of it."""

    bound_s: float
    """The work bound of as many rollouts as a step trains."""
    rollout: float | None
    """Of the rollouts of a step; None where the run overlaps, and a step has none of its own."""
    step: float
    """Of steps as wholes: the trainer works beside the rollouts where the run overlaps, and after them where it does not."""
    even: float | None
    """Of the rollouts, by what an order alone can do (`Bound.even_s`); of a run of one step only, whose longest it goes by."""


def gaps(summary: Summary, bound: Bound, *, share: float, overlapped: bool) -> Gaps:
    """`bound` is of all rollouts that the counted steps drew, and `share` that part of them which a step trains: the longest are a
    matter of single steps, and play no part unless there is one."""
    work_s = share * bound.work_s
    step_s = bound.step_s(summary.train_s, share=share, overlapped=overlapped)
    even = summary.rollout_s / bound.even_s - 1.0 if summary.steps == 1 else None
    rollout = None if overlapped else summary.rollout_s / work_s - 1.0
    return Gaps(work_s, rollout, summary.step_s / step_s - 1.0, even)


class EngineUse(msgspec.Struct, frozen=True):
    """What a run made of its engines."""

    idle: float
    """Share of their time in which they had nothing to compute."""
    kv_use: float
    """Share of their KV cache that running requests held, over all that time."""
    preemptions: int
    recomputed: int
    """Tokens computed once more: after preemptions, or for new weights."""
    generated: int
    """Tokens sampled."""
    prefix_hits: float
    """Share of the prompt tokens that their prefix caches had."""
    tokens_per_pass: float | None
    """Of a sequence: more than one where they speculate, and None where none does."""


def engine_use(engines: Iterable[Endpoint], now: float) -> EngineUse:
    """Of engines that are alike, from their start to `now`; one that was lost stood still from then on."""
    every = list(engines)
    totals = [engine.totals for engine in every]
    busy = [engine.busy_until(now) for engine in every]
    wall_s = max(1e-9, now * len(every))
    speed = every[0].speed
    speculate = any(engine.speed.speculation is not None for engine in every)
    return EngineUse(
        idle=1.0 - sum(seconds for seconds, _ in busy) / wall_s,
        kv_use=sum(area for _, area in busy) / (wall_s * (speed.kv_tokens // speed.block)),
        preemptions=sum(t.preemptions for t in totals),
        recomputed=sum(t.recomputed for t in totals),
        generated=sum(t.generated for t in totals),
        prefix_hits=sum(t.hits for t in totals) / max(1, sum(t.queries for t in totals)),
        tokens_per_pass=sum(t.steps for t in totals) / max(1.0, sum(t.passes for t in totals))
        if speculate
        else None,
    )


def ramp_s(
    times: Sequence[float],
    tokens: Sequence[float],
    settled_s: float,
    *,
    over_s: float = 30.0,
    share: float = 0.9,
) -> float:
    """Seconds until engines sample, over the last `over_s` seconds, at `share` of the rate that they have after `settled_s`.

    `tokens` are all that were sampled by each of `times`, which are even. It goes by tokens, and not by how many rollouts run: young
    contexts are light, and fewer of them or more may fill an engine. A run that never comes to that rate took all of its time; one
    that ends before `settled_s` is judged by its later half.
    """
    first = next((n for n, at in enumerate(times) if at >= settled_s), len(times) - 1)
    first = min(first, len(times) // 2)
    level = share * (tokens[-1] - tokens[first]) / max(1e-9, times[-1] - times[first])
    steps = max(1, round(over_s / (times[1] - times[0]))) if len(times) > 1 else 1
    for n in range(steps, len(times)):
        if tokens[n] - tokens[n - steps] >= level * (times[n] - times[n - steps]):
            return times[n] - times[0]
    return times[-1] - times[0]


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval by Student's t; 0 for a single value."""
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return mean, 0.0
    return mean, _T95[min(n - 1, len(_T95)) - 1] * float(np.std(values, ddof=1)) / n**0.5


_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last is a little too wide."""
