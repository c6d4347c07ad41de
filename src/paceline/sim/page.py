"""The page of a study: one HTML file that needs nothing else, tables first, then plots in SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from paceline.sim.cells import Cell, Spread, paired, spread


class Number(NamedTuple):
    """One of those that tables and pages show."""

    title: str
    meaning: str
    is_share: bool = False


NUMBERS: Mapping[str, Number] = {
    "goodput": Number(
        "trained tokens/s",
        "tokens of batches that were trained, a second",
    ),
    "ended_per_s": Number(
        "finished tokens/s",
        "tokens of rollouts that ended by themselves, a second; they may have trained or not",
    ),
    "step_s": Number(
        "step, s",
        "seconds from step to step",
    ),
    "rollout_s": Number(
        "rollout, s",
        "seconds from a batch's first start to its cut; where rollouts of the next batch are under way by then, between two cuts",
    ),
    "tail_s": Number(
        "tail, s",
        "seconds in which the last tenth of a batch's rollouts ends",
    ),
    "idle": Number(
        "idle",
        "share of the engines' time with nothing to compute",
        is_share=True,
    ),
    "kv_use": Number(
        "KV held",
        "share of their KV cache that running requests held, on the mean",
        is_share=True,
    ),
    "preemptions": Number(
        "preemptions",
        "requests that were thrown out of a full cache and computed again",
    ),
    "prefix_hits": Number(
        "prefix hits",
        "share of prompt tokens that were cached",
        is_share=True,
    ),
    "tokens_per_pass": Number(
        "tokens a pass",
        "tokens of a sequence in a pass of the model; more than one where engines speculate",
    ),
    "wasted_share": Number(
        "wasted",
        "tokens of rollouts that ended and did not train, by tokens that did; it may be above 100%",
        is_share=True,
    ),
    "length_mean": Number(
        "length bias",
        "mean length of what was trained, by that of what was drawn",
        is_share=True,
    ),
    "length_cap_share": Number(
        "at the cap",
        "share of the longest answers among the trained",
        is_share=True,
    ),
    "staleness_mean": Number(
        "staleness",
        "steps from the oldest token of a rollout to the step that trained it, mean",
    ),
    "staleness_max": Number(
        "most stale",
        "the same, of the most stale",
    ),
    "gap": Number(
        "over bound",
        "how much longer the rollouts of a step took than the work bound",
        is_share=True,
    ),
    "step_gap": Number(
        "step over bound",
        "how much longer steps took than the work bound and the trainer",
        is_share=True,
    ),
    "ramp_s": Number(
        "ramp, s",
        "seconds until tokens came at nine tenths of their later rate",
    ),
}
"""By their names in a cell, in the order in which they are shown."""

PAIRED: Mapping[str, str] = {
    "goodput": "trained tokens/s, times as many",
    "step_s": "steps, times as fast",
    "rollout_s": "rollouts, times as fast",
    "tail_s": "tails, times as fast",
}
"""Those that are told by those of the first policy, seed by seed, and how. All policies of a study meet the same tasks under one seed,
so that chance plays less part in this than in either."""

_BARS = ("goodput", "ended_per_s", "step_s", "tail_s", "idle", "length_mean", "staleness_mean", "gap")
_HUES = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { font-weight: 600; color: #4b5563 }
td small { color: #9ca3af } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 1.5rem } .wide { overflow-x: auto }
figure { margin: 0 } figcaption { font-size: 13px; color: #4b5563; margin-bottom: .3rem }
svg text { font: 11px system-ui, sans-serif; fill: #4b5563 } footer { color: #9ca3af; font-size: 12px; margin-top: 3rem }
"""


def number(value: float, name: str = "") -> str:
    """A number with three digits that count; shares in percent."""
    if name in NUMBERS and NUMBERS[name].is_share:
        return f"{100 * value:.1f}%"
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    digits = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 5 else f"{value:.3g}"


def table(cells: Sequence[Cell], workload: str) -> list[tuple[str, dict[str, Spread]]]:
    """By policy, in their order: every one of `NUMBERS` that it has."""
    policies = list(dict.fromkeys(cell.policy for cell in cells if cell.workload == workload))
    rows = []
    for policy in policies:
        mine = [c for c in cells if (c.policy, c.workload) == (policy, workload)]
        found = {name: value for name in NUMBERS if (value := spread(mine, name)) is not None}
        rows.append((policy, found))
    return rows


def against_first(cells: Sequence[Cell], workload: str) -> dict[str, dict[str, Spread]]:
    """Each of `PAIRED` by policy, those behind the first: how many times as many tokens, or as fast. Empty where there is one policy."""
    policies = list(dict.fromkeys(cell.policy for cell in cells if cell.workload == workload))
    if len(policies) < 2:
        return {}
    first, found = policies[0], dict[str, dict[str, Spread]]()
    for name in PAIRED:
        for policy in policies[1:]:
            of, by = (first, policy) if name == "goodput" else (policy, first)
            ratio = paired(cells, of, by, name, workload)
            if ratio is not None:
                found.setdefault(name, {})[policy] = ratio
    return found


def page(title: str, cells: Sequence[Cell], facts: Sequence[tuple[str, str]]) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<p>" + " · ".join(f"{escape(k)} {escape(v)}" for k, v in facts) + "</p>",
    ]
    for workload in dict.fromkeys(cell.workload for cell in cells):
        rows = table(cells, workload)
        parts.append(f"<h2>{escape(workload)}</h2><div class='wide'>{_table(rows)}</div>")
        parts.append(_paired(rows, against_first(cells, workload)))
        parts.append("<div class='plots'>")
        shown = [name for name in _BARS if any(name in found for _, found in rows)]
        parts += [_figure(NUMBERS[name].title, _bars(rows, name)) for name in shown]
        mine = [c for c in cells if c.workload == workload]
        firsts = list({c.policy: c for c in reversed(mine)}.values())[::-1]
        if any(c.step_s for c in firsts):
            series = [(c.policy, [(n + 1.0, s) for n, s in enumerate(c.step_s)]) for c in firsts if c.step_s]
            parts.append(_figure("seconds of each step, first seed", _lines(series)))
        if any(c.points for c in firsts):
            for what, read in (
                ("KV held over time, first seed", lambda p: p.kv_usage),
                ("rollouts in flight over time, first seed", lambda p: float(p.in_flight)),
            ):
                series = [(c.policy, [(p.at, read(p)) for p in c.points]) for c in firsts if c.points]
                parts.append(_figure(what, _lines(series)))
        parts.append("</div>")
    legend = "".join(
        f"<dt>{escape(each.title)}</dt><dd>{escape(each.meaning)}</dd>" for each in NUMBERS.values()
    )
    parts.append(f"<details><summary>What the numbers are</summary><dl>{legend}</dl></details>")
    parts.append(
        "<footer>Simulated by Paceline: the production core under a virtual clock. ± is half the width of a 95% "
        "interval over the seeds.</footer>"
    )
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><body>{body}</body></html>\n"
    )


def _table(rows: Sequence[tuple[str, dict[str, Spread]]]) -> str:
    """A number a row and a policy a column, as in a terminal: there are more numbers than policies."""
    lines = [
        (each.title, [_value(found.get(name), name) for _, found in rows])
        for name, each in NUMBERS.items()
        if any(name in found for _, found in rows)
    ]
    return _html_table([policy for policy, _ in rows], lines)


def _paired(rows: Sequence[tuple[str, dict[str, Spread]]], found: Mapping[str, Mapping[str, Spread]]) -> str:
    if not found:
        return ""
    first, *others = [policy for policy, _ in rows]
    lines = [
        (PAIRED[name], [_value(by_policy.get(policy), name="") for policy in others])
        for name, by_policy in found.items()
    ]
    return f"<p>By {escape(first)}, seed by seed</p><div class='wide'>{_html_table(others, lines)}</div>"


def _value(value: Spread | None, name: str) -> str:
    return "" if value is None else f"{number(value.mean, name)} <small>±{number(value.half, name)}</small>"


def _html_table(heads: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """`lines`: a title, and what is in its cells, as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *heads))
    body = "".join(
        f"<tr><td>{escape(title)}</td>{''.join(f'<td>{value}</td>' for value in values)}</tr>"
        for title, values in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _bars(rows: Sequence[tuple[str, dict[str, Spread]]], name: str) -> str:
    width, left, bar = 440, 150, 20
    present = [
        (policy, found[name], _HUES[place % len(_HUES)])
        for place, (policy, found) in enumerate(rows)
        if name in found
    ]
    low = min(0.0, *(v.mean - v.half for _, v, _ in present))
    high = max(0.0, *(v.mean + v.half for _, v, _ in present))
    scale = (width - left - 70) / max(1e-12, high - low)

    def x(value: float) -> float:
        return left + (value - low) * scale

    parts = []
    for row, (policy, value, hue) in enumerate(present):
        y = row * (bar + 8) + 4
        start, end = sorted((x(0.0), x(value.mean)))
        middle = y + bar / 2
        parts.append(
            f"<text x='{left - 8}' y='{middle + 4}' text-anchor='end'>{escape(policy)}</text>"
            f"<rect x='{start:.1f}' y='{y}' width='{max(1.0, end - start):.1f}' height='{bar}' fill='{hue}' rx='2'/>"
            f"<line x1='{x(value.mean - value.half):.1f}' x2='{x(value.mean + value.half):.1f}' y1='{middle}' "
            f"y2='{middle}' stroke='#111827'/>"
            f"<text x='{x(max(0.0, value.mean + value.half)) + 6:.1f}' y='{middle + 4}'>{number(value.mean, name)}</text>"
        )
    height = len(present) * (bar + 8) + 4
    return f"<svg width='{width}' height='{height}' role='img'>{''.join(parts)}</svg>"


def _lines(series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    width, height, left, bottom = 440, 220, 52, 24
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    x0, x1, y1 = min(xs), max(xs), max(ys) or 1.0

    def at(x: float, y: float) -> str:
        across = left + (x - x0) / max(1e-12, x1 - x0) * (width - left - 8)
        return f"{across:.1f},{(height - bottom) * (1 - y / y1) + 8:.1f}"

    parts = [f"<line x1='{left}' x2='{left}' y1='8' y2='{height - bottom + 8}' stroke='#d1d5db'/>"]
    for share in (0.0, 0.5, 1.0):
        y = (height - bottom) * (1 - share) + 8
        parts.append(f"<text x='{left - 6}' y='{y + 4:.0f}' text-anchor='end'>{number(share * y1)}</text>")
        parts.append(f"<line x1='{left}' x2='{width}' y1='{y:.0f}' y2='{y:.0f}' stroke='#f3f4f6'/>")
    parts.append(f"<text x='{left}' y='{height}'>{number(x0)}</text>")
    parts.append(f"<text x='{width - 4}' y='{height}' text-anchor='end'>{number(x1)}</text>")
    for row, (name, points) in enumerate(series):
        hue = _HUES[row % len(_HUES)]
        thin = points[:: max(1, len(points) // 400)]
        parts.append(
            f"<polyline points='{' '.join(at(x, y) for x, y in thin)}' fill='none' stroke='{hue}' stroke-width='1.5'/>"
        )
        parts.append(
            f"<text x='{width - 6}' y='{20 + 13 * row}' text-anchor='end' style='fill:{hue}'>{escape(name)}</text>"
        )
    return f"<svg width='{width}' height='{height + 4}' role='img'>{''.join(parts)}</svg>"
