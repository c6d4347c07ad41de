"""The live view: a panel on a terminal, plain lines on a pipe.

The run's thread only takes notes, a few times a second; rich draws them in a thread of its own, so that a slow
terminal delays nothing.
"""

from __future__ import annotations

import os
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.domain.commands import Command, FinishRun, NoteDead, NoteOutage, NoteQuarantine, ShipBatch
from paceline.domain.events import Event, RunOpened
from paceline.domain.ids import EnvName
from paceline.observe.drawing import spread, tokens_bar, trend
from paceline.observe.monitor import View
from paceline.observe.plain import PlainView
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds, trained_steps
from paceline.observe.told import WHOLE, Elapsed, News, eval_title, number, one_line, row_text, seconds_text

_NOTE_S = 0.25
_FATES: tuple[str, ...] = (
    "shipped", "zero_signal", "filtered", "stale", "failed", "cancelled", "truncated", "overlong", "void",
    "left_over", "discarded", "deferred", "eval",
)  # fmt: skip


def open_view(
    folds: RunFolds,
    stream: TextIO,
    *,
    max_steps: int,
    cap: Callable[[], int] | None = None,
    disk: Callable[[], str] | None = None,
    plain: bool = False,
) -> View:
    """A panel if `stream` is a terminal and `plain` is not asked for, else lines. `cap` and `disk`: what the folds do not
    know."""
    terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if terminal and not plain:
        return LiveView(folds, Console(file=stream), max_steps=max_steps, cap=cap, disk=disk)
    return PlainView(folds, stream, max_steps=max_steps)


class _Notes(msgspec.Struct, frozen=True):
    """What the panel shows: taken on the run's thread, drawn on another."""

    step: int
    doing: str
    """In place of the step, before the first one is trained."""
    reward: dict[str, tuple[float, ...]]
    """By environment, where there are several; of all of them under the empty name."""
    held_out: dict[str, tuple[float, ...]]
    values: dict[str, float]
    in_flight: tuple[int, int]
    cap: int | None
    disk: str
    queued: int
    goodput: float | None
    tokens: dict[str, int]
    left_s: float | None
    warnings: tuple[str, ...]
    events: tuple[str, ...]


class LiveView:
    """A panel that redraws itself."""

    def __init__(
        self,
        folds: RunFolds,
        console: Console,
        *,
        max_steps: int,
        cap: Callable[[], int] | None = None,
        disk: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folds, self._max_steps, self._cap, self._disk = folds, max_steps, cap, disk
        self._time = Elapsed(folds, clock)
        self._phase = "starting"
        self._warnings: dict[EnvName, str] = {}
        self._outages: dict[EnvName, str] = {}
        self._events: deque[str] = deque(maxlen=5)
        self._news = News()
        self._next = 0.0
        self._resuming = folds.run.status is not None
        self._notes = self._take_notes()
        self._live = Live(console=console, get_renderable=self.panel, refresh_per_second=4, transient=False)
        self._restore = _hide_ctrl_c(console)
        self._live.start()

    def decided(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if type(event) is RunOpened:
            self._time.opened(at)
            self._resuming = False
            self._phase = "" if trained_steps(self._folds) else "first rollouts"
        for text in self._news.of(at, event, commands):
            self._event(at, text)
        for command in commands:
            if type(command) is ShipBatch and self._phase:
                self._phase = f"training step {command.batch.step}"
            elif type(command) is NoteDead:
                self._warnings.pop(command.env, None)
                if command.groups:
                    self._warnings[command.env] = command.reason
            elif type(command) is NoteOutage:
                self._outages.pop(command.env, None)
                if command.out:
                    self._outages[command.env] = command.reason
            elif type(command) is NoteQuarantine:
                self._event(at, command.reason)
        ends = bool(commands) and type(commands[-1]) is FinishRun
        if ends:
            self._time.stop()
        if at >= self._next or ends:
            self._next = at + _NOTE_S
            self._notes = self._take_notes()

    def row(self, row: Row) -> None:
        if row.kind == "eval":
            self._event(row.at, row_text(row, self._max_steps))
        elif row.kind == "step" and row.trained:
            self._phase = ""

    def phase(self, text: str) -> None:
        self._phase = text
        self._notes = self._take_notes()

    def _event(self, at: float, text: str) -> None:
        self._events.append(f"{seconds_text(self._time.at(at)):>7}  {text}")

    def close(self) -> None:
        self._live.stop()
        self._restore()

    def _take_notes(self) -> _Notes:
        folds = self._folds
        steps = folds.training.steps
        held_out: dict[str, tuple[float, ...]] = {}
        for row in folds.training.evals:
            if (reward := row.values.get(f"eval/{row.env}/reward")) is not None:
                held_out[row.env] = (*held_out.get(row.env, ()), reward)
        recent = [steps[index] for index in range(max(0, len(steps) - 8), len(steps))]
        seconds = [row.values["time/step_s"] for row in recent if "time/step_s" in row.values]
        last = steps[-1] if steps else None
        envs = [env for env, split in folds.lives.tallies if split == "train"]
        shown = {"": "all"} | ({env: env for env in envs} if len(envs) > 1 else {})
        rewards = {name: f"train/{scope}/reward" for name, scope in shown.items()}
        left = (self._max_steps - last.step) * sum(seconds) / len(seconds) if last and seconds else None
        settled = folds.account.settled_tokens()
        tokens: dict[str, int] = {fate: settled[fate] for fate in _FATES if settled.get(fate)}
        tokens["under way"] = max(0, folds.lives.sampled_tokens - sum(settled.values()))
        return _Notes(
            step=trained_steps(folds),
            doing=self._phase,
            reward={
                env: tuple(row.values[name] for row in spread(steps) if name in row.values)
                for env, name in rewards.items()
            },
            warnings=(*self._outages.values(), *self._warnings.values()),
            held_out=held_out,
            values=last.values if last else {},
            in_flight=(folds.lives.in_flight["train"], folds.lives.in_flight["eval"]),
            cap=self._cap() if self._cap else None,
            disk=self._disk() if self._disk else "",
            queued=len(folds.lives.queue),
            goodput=folds.account.goodput(),
            tokens=tokens,
            left_s=left,
            events=tuple(self._events),
        )

    def panel(self) -> RenderableType:
        """What is drawn now."""
        notes, folds = self._notes, self._folds
        running = folds.run.status is None or self._resuming
        left = f" · about {seconds_text(notes.left_s)} left" if running and notes.left_s else ""
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(
            Text(notes.doing or f"step {notes.step}/{self._max_steps}", style="bold"),
            Bar(self._max_steps, 0, notes.step, color="green", bgcolor="grey23"),
            Text(f"{seconds_text(self._time.now())}{left}", style="dim"),
        )
        title = Text(f" {folds.run.run_id or 'paceline'} ", style="bold")
        if not running:
            title.append(f"{folds.run.status} ", style="green" if folds.run.status == "done" else "yellow")
        body = [head, Text(""), self._numbers(notes), Text(""), tokens_bar(notes.tokens)]
        if notes.warnings:
            body += [
                Text(""),
                *(Text(one_line(text, longest=WHOLE), style="yellow") for text in notes.warnings),
            ]
        if notes.events:
            body += [
                Text(""),
                *(
                    Text(one_line(text), style="dim", no_wrap=True, overflow="ellipsis")
                    for text in notes.events
                ),
            ]
        return Panel(Group(*body), title=title, title_align="left", border_style="grey50")

    @staticmethod
    def _numbers(notes: _Notes) -> Table:
        get = notes.values.get
        table = Table.grid(padding=(0, 2), expand=True)
        for shortest, ratio in ((9, None), (0, 5), (9, None), (0, 4)):
            # Labels are not given up for a long value, and columns stay where they are when values change.
            table.add_column(no_wrap=True, min_width=shortest, ratio=ratio)
        cap = f" of {notes.cap}" if notes.cap else ""
        evals = f" + {notes.in_flight[1]} eval" if notes.in_flight[1] else ""
        left = [trend(f"reward {env}".strip(), rewards) for env, rewards in notes.reward.items()]
        left += [trend(eval_title(env), rewards) for env, rewards in notes.held_out.items()]
        right: list[tuple[str, RenderableType]] = [
            ("in flight", Text(f"{notes.in_flight[0]}{evals}{cap}, {notes.queued} queued")),
            (
                "staleness",
                Text(f"{number(get('staleness/mean'))} mean, {number(get('staleness/max'))} max"),
            ),
            ("tokens/s", Text(number(get("throughput/sampled")))),
            (
                "goodput",
                Text("–" if notes.goodput is None else f"{notes.goodput:.0%} of train tokens"),
            ),
        ]
        if notes.disk:
            right.append(("disk", Text(notes.disk)))
        nothing: tuple[str, RenderableType] = ("", Text(""))
        for index in range(max(len(left), len(right))):
            a = left[index] if index < len(left) else nothing
            b = right[index] if index < len(right) else nothing
            table.add_row(Text(a[0], style="dim"), a[1], Text(b[0], style="dim"), b[1])
        return table


def _hide_ctrl_c(console: Console) -> Callable[[], None]:
    """Keep a terminal from writing `^C` into the panel, which would shift it by a line; returns what undoes it."""
    try:
        terminal = console.file.fileno()
        before = termios.tcgetattr(terminal)
        hidden = [*before]
        hidden[3] &= ~termios.ECHOCTL
        termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    except (OSError, ValueError, termios.error):  # no terminal
        return lambda: None
    return lambda: termios.tcsetattr(terminal, termios.TCSANOW, before)
