"""Chrome trace JSON of a run's spans, for Perfetto, speedscope or chrome://tracing."""

from __future__ import annotations

import gzip
import heapq
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.observe.spans import Lane, Spans

_ROLLOUTS, _ENGINES, _TRAINER = 1, 2, 3  # process ids of the trace


def trace_events(spans: Spans) -> Iterator[dict[str, Any]]:
    """Events of the Chrome trace format, times in microseconds. One row a place: rollouts reuse free rows."""
    for pid, name in ((_ROLLOUTS, "rollouts"), (_ENGINES, "engines"), (_TRAINER, "trainer")):
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    rows = assign_rows(spans.lanes(), spans.now)
    for row in range(max(rows.values(), default=-1) + 1):
        yield {
            "ph": "M",
            "pid": _ROLLOUTS,
            "tid": row,
            "name": "thread_name",
            "args": {"name": f"place {row}"},
        }
    for lane in spans.lanes():
        yield from _lane(lane, rows[id(lane)], spans.now)
    yield from _engines(spans)
    for step in spans.steps:
        yield {
            "ph": "i",
            "s": "g",
            "pid": _TRAINER,
            "tid": 0,
            "ts": _us(step.cut),
            "name": f"cut step {step.step}",
        }
        if step.shipped is not None:
            yield _span(_TRAINER, 0, "ship", step.cut, step.shipped, {"step": step.step})
        if step.shipped is not None and step.trained is not None:
            args = {"step": step.step, "rollouts": step.rollouts}
            yield _span(_TRAINER, 1, f"train step {step.step}", step.shipped, step.trained, args)


def write_trace(spans: Spans, path: Path) -> int:
    """Write the trace, gzipped when the name ends in `.gz`; returns the number of events. Raises OSError."""
    count = 0
    with ExitStack() as stack:
        raw = stack.enter_context(path.open("wb"))
        binary = stack.enter_context(gzip.open(raw, "wb")) if path.suffix == ".gz" else raw
        file = stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8"))
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in trace_events(spans):
            file.write((",\n" if count else "") + json.dumps(event, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


def assign_rows(lanes: list[Lane], now: float) -> dict[int, int]:
    """A row for every lane (by `id`), so that no two of a row overlap and few rows are used."""
    rows: dict[int, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for lane in lanes:
        while busy and busy[0][0] <= lane.started:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (lane.ended if lane.ended is not None else now, row))
        rows[id(lane)] = row
    return rows


def _lane(lane: Lane, row: int, now: float) -> Iterator[dict[str, Any]]:
    end = lane.ended if lane.ended is not None else now
    args = {
        "rollout": str(lane.id),
        "env": lane.task.env,
        "split": lane.task.split,
        "task": lane.task.index,
        "version": lane.version,
        "ending": lane.ending or "in flight",
        "cause": lane.cause,
        "reward": lane.reward,
    }
    yield _span(_ROLLOUTS, row, f"{lane.task.env} {lane.id}", lane.started, end, args)
    free_at = lane.started
    number = -1
    for turn in lane.turns:
        number += not turn.goes_on
        if turn.asked > free_at:
            yield _span(_ROLLOUTS, row, "environment", free_at, turn.asked, {})
        granted = turn.granted if turn.granted is not None else end
        if granted > turn.asked:
            yield _span(_ROLLOUTS, row, "gate", turn.asked, granted, {"turn": number})
        free_at = granted
        if turn.granted is not None:
            free_at = turn.ended if turn.ended is not None else end
            call = {
                "turn": number,
                "engine": turn.engine,
                "context": turn.context,
                "cached": turn.cached,
                "sampled": turn.tokens,
                "versions": list(turn.versions),
            }
            yield _span(_ROLLOUTS, row, "model", turn.granted, free_at, call)
    if end > free_at:
        yield _span(_ROLLOUTS, row, "environment", free_at, end, {})


def _engines(spans: Spans) -> Iterator[dict[str, Any]]:
    names = sorted({update.engine for update in spans.updates} | set(spans.readings))
    for row, engine in enumerate(names):
        yield {"ph": "M", "pid": _ENGINES, "tid": row, "name": "thread_name", "args": {"name": engine}}
    for update in spans.updates:
        end = update.ended if update.ended is not None else spans.now
        args = {"version": update.version, "error": update.error}
        yield _span(
            _ENGINES, names.index(update.engine), f"load v{update.version}", update.started, end, args
        )
    for engine, readings in spans.readings.items():
        for reading in readings:
            load = {"running": reading.running, "waiting": reading.waiting}
            yield {
                "ph": "C",
                "pid": _ENGINES,
                "ts": _us(reading.at),
                "name": f"{engine} requests",
                "args": load,
            }
            usage = {"kv": round(reading.kv_usage, 4)}
            yield {
                "ph": "C",
                "pid": _ENGINES,
                "ts": _us(reading.at),
                "name": f"{engine} kv usage",
                "args": usage,
            }


def _span(pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    span = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": _us(start),
        "dur": max(0, _us(end) - _us(start)),
    }
    return span | ({"args": args} if args else {})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
