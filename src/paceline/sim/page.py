"""The page of a study: one HTML file that needs nothing else, tables first, then plots in SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

from paceline.sim.cells import Cell, Spread, spread

COLUMNS: Mapping[str, str] = {
    "goodput": "trained tokens/s",
    "ended_per_s": "finished tokens/s",
    "step_s": "step, s",
    "rollout_s": "rollout, s",
    "tail_s": "tail, s",
    "idle": "idle",
    "kv_use": "KV held",
    "preemptions": "preemptions",
    "prefix_hits": "prefix hits",
    "tokens_per_pass": "tokens a pass",
    "wasted_share": "wasted",
    "length_mean": "length bias",
    "length_cap_share": "at the cap",
    "staleness_mean": "staleness",
    "staleness_max": "most stale",
    "gap": "over bound",
    "step_gap": "step over bound",
    "ramp_s": "ramp, s",
}
"""Numbers of the table, in order, and what they are called."""

MEANINGS: Mapping[str, str] = {
    "goodput": "tokens of batches that were trained, a second",
    "ended_per_s": "tokens of rollouts that ended by themselves, a second; they may have trained or not",
    "step_s": "seconds from step to step",
    "rollout_s": "seconds from a batch's first start to its cut; where rollouts of the next batch are under way by then, between two cuts",
    "tail_s": "seconds in which the last tenth of a batch's rollouts ends",
    "idle": "share of the engines' time with nothing to compute",
    "kv_use": "share of their KV cache that running requests held, on the mean",
    "preemptions": "requests that were thrown out of a full cache and computed again",
    "prefix_hits": "share of prompt tokens that were cached",
    "tokens_per_pass": "tokens of a sequence in a pass of the model; more than one where engines speculate",
    "wasted_share": "tokens of rollouts that ended and did not train, by tokens that did; it may be above 100%",
    "length_mean": "mean length of what was trained, by that of what was drawn",
    "length_cap_share": "share of the longest answers among the trained",
    "staleness_mean": "steps from the oldest token of a rollout to the step that trained it, mean",
    "staleness_max": "the same, of the most stale",
    "gap": "how much longer the rollouts of a step took than the work bound",
    "step_gap": "how much longer steps took than the work bound and the trainer",
    "ramp_s": "seconds until tokens came at nine tenths of their later rate",
}
"""What each of them is, in words."""

SHARES = frozenset(
    {"idle", "kv_use", "prefix_hits", "wasted_share", "length_mean", "length_cap_share", "gap", "step_gap"}
)
_BARS = ("goodput", "ended_per_s", "step_s", "tail_s", "idle", "length_mean", "staleness_mean", "gap")
_HUES = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { font-weight: 600; color: #4b5563 }
td small { color: #9ca3af } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem } .wide { overflow-x: auto }
figure { margin: 0 } figcaption { font-size: 13px; color: #4b5563; margin-bottom: .3rem }
svg text { font: 11px system-ui, sans-serif; fill: #4b5563 } footer { color: #9ca3af; font-size: 12px; margin-top: 3rem }
"""


def number(value: float, name: str = "") -> str:
    """A number with three digits that count; shares in percent."""
    if name in SHARES:
        return f"{100 * value:.1f}%"
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    digits = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 5 else f"{value:.3g}"


def table(cells: Sequence[Cell], workload: str) -> list[tuple[str, dict[str, Spread]]]:
    """By policy, in their order: every number of `COLUMNS` that any has."""
    policies = list(dict.fromkeys(cell.policy for cell in cells if cell.workload == workload))
    rows = []
    for policy in policies:
        mine = [c for c in cells if (c.policy, c.workload) == (policy, workload)]
        found = {name: value for name in COLUMNS if (value := spread(mine, name)) is not None}
        rows.append((policy, found))
    return rows


def page(title: str, cells: Sequence[Cell], facts: Sequence[tuple[str, str]]) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<p>" + " · ".join(f"{escape(k)} {escape(v)}" for k, v in facts) + "</p>",
    ]
    for workload in dict.fromkeys(cell.workload for cell in cells):
        rows = table(cells, workload)
        parts.append(f"<h2>{escape(workload)}</h2><div class='wide'>{_table(rows)}</div><div class='plots'>")
        shown = [name for name in _BARS if any(name in found for _, found in rows)]
        parts += [_figure(COLUMNS[name], _bars(rows, name)) for name in shown]
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
        f"<dt>{escape(COLUMNS[name])}</dt><dd>{escape(said)}</dd>" for name, said in MEANINGS.items()
    )
    parts.append(f"<details><summary>What the columns are</summary><dl>{legend}</dl></details>")
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
    names = [name for name in COLUMNS if any(name in found for _, found in rows)]
    head = "".join(f"<th>{escape(COLUMNS[name])}</th>" for name in names)
    lines = []
    for policy, found in rows:
        values = "".join(
            f"<td>{number(v.mean, name)} <small>±{number(v.half, name)}</small></td>"
            if (v := found.get(name))
            else "<td></td>"
            for name in names
        )
        lines.append(f"<tr><td>{escape(policy)}</td>{values}</tr>")
    return f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _bars(rows: Sequence[tuple[str, dict[str, Spread]]], name: str) -> str:
    width, left, bar = 440, 150, 20
    present = [(policy, found[name]) for policy, found in rows if name in found]
    low = min(0.0, *(v.mean - v.half for _, v in present))
    high = max(0.0, *(v.mean + v.half for _, v in present))
    scale = (width - left - 70) / max(1e-12, high - low)

    def x(value: float) -> float:
        return left + (value - low) * scale

    parts = []
    for row, (policy, value) in enumerate(present):
        y = row * (bar + 8) + 4
        start, end = sorted((x(0.0), x(value.mean)))
        hue = _HUES[row % len(_HUES)]
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
