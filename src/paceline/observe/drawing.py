"""Small drawings of text blocks for the live view's panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

_Value = TypeVar("_Value")
_SPARK = "▁▂▃▄▅▆▇█"
_COLOURS: dict[str, str] = {
    "shipped": "green",
    "under way": "bright_black",
    "zero_signal": "yellow",
    "filtered": "dark_orange",
    "stale": "magenta",
    "failed": "red",
    "cancelled": "bright_red",
    "truncated": "purple",
    "overlong": "blue",
    "void": "grey50",
    "left_over": "grey35",
    "discarded": "orange4",
    "deferred": "steel_blue",
    "eval": "cyan",
}


def spread(values: Sequence[_Value], count: int = 20) -> list[_Value]:
    """At most `count` of the values, evenly over all of them, first and last included."""
    size = len(values)
    return (
        [values[round(k * (size - 1) / (count - 1))] for k in range(count)] if size > count else list(values)
    )


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """`width` of the values as blocks, first and last among them, scaled to their own range."""
    shown = spread(values, width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(_SPARK[round((value - low) / span * (len(_SPARK) - 1))] for value in shown)


def tokens_bar(tokens: dict[str, int], width: int = 60) -> RenderableType:
    """Where tokens went: one bar and its legend."""
    total = sum(tokens.values())
    if not total:
        return Text("no tokens sampled yet", style="dim")
    bar, legend = Text("tokens  ", style="dim"), Text("        ")
    done = cells = 0
    for place, count in tokens.items():
        if not count:
            continue
        done += count
        until = round(done / total * width)
        bar.append("█" * (until - cells), style=_COLOURS[place])
        cells = until
        legend.append("■ ", style=_COLOURS[place])
        legend.append(f"{place.replace('_', ' ')} {count / total:.0%}  ", style="dim")
    bar.append(f"  {total:,}", style="dim")
    return Group(bar, legend)


def trend(name: str, values: Sequence[float]) -> tuple[str, RenderableType]:
    if not values:
        return name, Text("–")
    text = Text(f"{values[-1]:.3f} ", style="bold")
    text.append(sparkline(values), style="green")
    if len(values) > 1:
        text.append(f" from {values[0]:.3f}", style="dim")
    return name, text
