"""What the report shows, as one JSON-like tree: small enough to be a page, whatever the length of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.observe.account import PLACES
from paceline.observe.conversations import conversation
from paceline.observe.report.terms import TERMS
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds, summary
from paceline.observe.spans import Lane, Spans

MAX_POINTS = 1000
"""Points of a curve; a longer run is shown in means over several steps (and maxima for maxima)."""
MAX_LANES = 4000
"""Rollouts of the timeline; older ones are left out, and counted."""


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows beside the journal."""

    name: str = ""
    """Of the run; its id when left out."""
    facts: tuple[tuple[str, str], ...] = ()
    """Lines for the head, such as the model."""
    status: tuple[str, str] | None = None
    """Status and reason, where something knows better than the journal (a killed run cannot write its end)."""
    messages: Mapping[RolloutId, Rollout] = {}
    """Rollouts with their messages, where the journal keeps those apart."""
    config: str = ""
    """As resolved."""
    footer: str = ""


def report_data(folds: RunFolds, extras: Extras) -> dict[str, Any]:
    """Everything the page reads."""
    steps, series = _series(latest(folds.training.steps))
    lines = folds.account.lines()
    picks = [
        (label, extras.messages.get(rollout.id, rollout)) for label, rollout in folds.conversations.picks()
    ]
    return {
        "facts": _facts(folds, extras),
        "scopes": ["all", *(line.env for line in lines if line.split == "train")],
        "steps": steps,
        "series": series,
        "evals": _evals(folds.training.evals),
        "places": list(PLACES),
        "terms": TERMS,
        "account": [
            msgspec.to_builtins(line)
            | {"missing_tokens": line.missing_tokens, "missing_rollouts": line.missing_rollouts}
            for line in lines
        ],
        "bias": [msgspec.to_builtins(entry) | {"ratio": entry.ratio} for entry in folds.lengths.bias()],
        "timeline": _timeline(folds.spans),
        "conversations": [
            msgspec.to_builtins(conversation(label, rollout)) for label, rollout in picks if rollout.messages
        ],
        "config": extras.config,
    }


def latest(rows: Sequence[Row]) -> list[Row]:
    """One row a step, in order of steps: after a resumption, the steps it repeats replace those before.

    A step that was trained from a batch that an earlier life cut keeps what its cut told.
    """
    by_step: dict[int, Row] = {}
    for row in rows:
        before = by_step.get(row.step)
        if before is not None and "batch/rollouts" not in row.values:
            row = msgspec.structs.replace(row, values=before.values | row.values)
        by_step[row.step] = row
    return [by_step[step] for step in sorted(by_step)]


def _facts(folds: RunFolds, extras: Extras) -> dict[str, Any]:
    told = summary(folds)
    if extras.status is not None:
        told["status"], told["reason"] = extras.status
    engines = [
        f"{engine.id} ({engine.kv_tokens:,} KV tokens)" if engine.kv_tokens else engine.id
        for engine in folds.run.engines.values()
    ]
    names = [line.env for line in folds.account.lines() if line.split == "train"]
    lines = [
        ("environments", ", ".join(names)),
        ("engines", ", ".join(engines)),
        ("seed", str(folds.run.seed)),
    ]
    return {
        "name": extras.name or folds.run.run_id or "run",
        "lines": [*extras.facts, *((name, value) for name, value in lines if value)],
        "footer": extras.footer,
        **{
            name: told[name]
            for name in ("status", "reason", "steps", "heldout", "wall_s", "goodput", "rollouts")
        },
        **{name: told[name] for name in ("heldout_start", "heldout_end", "tokens_sampled")},
    }


def _series(rows: Sequence[Row]) -> tuple[list[int], dict[str, list[float | None]]]:
    names = sorted({name for row in rows for name in row.values})
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))
    bins = [rows[start : start + stride] for start in range(0, len(rows), stride)]
    series = {}
    for name in names:
        fold = max if name.endswith("/max") else _mean
        series[name] = [
            fold(known)
            if (known := [v for row in group if (v := _finite(row.values.get(name))) is not None])
            else None
            for group in bins
        ]
    return [group[-1].step for group in bins], {
        name: [_short(v) for v in values] for name, values in series.items()
    }


def _evals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry an environment; a version measured twice counts once, by its last measurement."""
    envs: dict[str, dict[int, float | None]] = {}
    for row in rows:
        envs.setdefault(row.env, {})[row.step] = _short(_finite(row.values.get(f"eval/{row.env}/reward")))
    return [
        {"env": env, "version": sorted(points), "reward": [points[version] for version in sorted(points)]}
        for env, points in sorted(envs.items())
    ]


def _timeline(spans: Spans) -> dict[str, Any]:
    since = spans.since
    lanes = [lane for lane in spans.lanes() if lane.ended is None or lane.ended >= since]
    left_out = max(0, len(lanes) - MAX_LANES)
    lanes = lanes[left_out:]
    if lanes and left_out:
        since = max(since, lanes[0].started)
    end = max([spans.now, *(lane.ended or 0.0 for lane in lanes)])

    def t(at: float | None) -> float | None:
        return None if at is None else round(min(max(at, since), end) - since, 4)

    def packed(lane: Lane) -> list[Any]:
        turns = [
            [t(turn.asked), t(turn.granted), t(turn.ended), turn.tokens, turn.context, turn.cached,
             turn.versions[-1] if turn.versions else None, int(turn.goes_on)]
            for turn in lane.turns
            if turn.ended is None or turn.ended >= since
        ]  # fmt: skip
        group, member, attempt = lane.id
        return [
            lane.task.env, lane.task.split, group, member, attempt, lane.engine, lane.version, t(lane.started),
            t(end if lane.ended is None else lane.ended), lane.ending, lane.cause, _finite(lane.reward),
            lane.task.index, turns,
        ]  # fmt: skip

    return {
        "since": round(since - spans.opened_at, 4),
        "span": round(end - since, 4),
        "left_out": left_out,
        "lanes": [packed(lane) for lane in lanes],
        "in_flight": [[t(at), n] for at, n in in_flight(lanes, since)],
        "updates": [
            {"engine": u.engine, "version": u.version, "start": t(u.started), "end": t(end if u.ended is None else u.ended)}
            for u in spans.updates
            if u.ended is None or u.ended >= since
        ],
        "steps": [{"step": step.step, "cut": t(step.cut)} for step in spans.steps if step.cut >= since],
    }  # fmt: skip


def in_flight(lanes: Sequence[Lane], since: float) -> list[tuple[float, int]]:
    """Rollouts in flight over time, as (time, count from then on)."""
    changes: dict[float, int] = {since: 0}
    for lane in lanes:
        start = max(lane.started, since)
        changes[start] = changes.get(start, 0) + 1
        if lane.ended is not None:
            changes[lane.ended] = changes.get(lane.ended, 0) - 1
    curve, count = [], 0
    for at in sorted(changes):
        count += changes[at]
        curve.append((at, count))
    return curve


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
