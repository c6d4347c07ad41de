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
from typing import TextIO, TypeVar

import msgspec
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.domain.commands import Command, FinishRun, NoteDead, NoteOutage, NoteQuarantine, ShipBatch
from paceline.domain.events import (
    CheckpointSaved,
    EngineJoined,
    EngineLost,
    Event,
    RolloutEnded,
    RunOpened,
    ShutdownRequested,
    WeightsLoaded,
)
from paceline.domain.ids import EnvName
from paceline.domain.rollout import Rollout
from paceline.observe.monitor import View
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds, trained_steps
from paceline.observe.sinks.pump import Outbox

_Value = TypeVar("_Value")
_NOTE_S = 0.25
_LINE, _WHOLE = 160, 1000
"""Characters shown of a line, and of a warning that has to be read to its end."""
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


class PlainView:
    """One line for the start, every step, every eval, whatever went wrong, and the end."""

    def __init__(
        self,
        folds: RunFolds,
        stream: TextIO,
        *,
        max_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._max_steps = stream, max_steps
        self._time = _Elapsed(folds, clock)
        self._news = News()
        self._broken = False
        # A pipe whose reader has stopped reading blocks whoever writes: let that be another thread.
        self._lines: Outbox[str] = Outbox("lines", self._print, lambda: None, size=4096)

    def decided(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if type(event) is RunOpened:
            self._time.opened(at)
        if (text := self._news.of(at, event)) is not None:
            self._line(self._time.at(at), text)
        for command in commands:
            if type(command) is NoteDead:
                told = (
                    f"warning: {command.reason}"
                    if command.groups
                    else f"env {command.env!r}: {command.reason}"
                )
                self._line(self._time.at(at), told, whole=True)
            elif type(command) is NoteOutage:
                told = f"warning: {command.reason}" if command.out else command.reason
                self._line(self._time.at(at), told, whole=True)
            elif type(command) is NoteQuarantine:
                self._line(self._time.at(at), f"warning: {command.reason}", whole=True)
            elif type(command) is FinishRun:
                self._line(self._time.at(at), f"{command.status}: {command.reason}")

    def row(self, row: Row) -> None:
        self._line(self._time.at(row.at), row_text(row, self._max_steps))

    def phase(self, text: str) -> None:
        self._line(self._time.now(), text, whole=True)

    def close(self) -> None:
        self._lines.finish()
        self._lines.join(1.0)

    def _line(self, elapsed: float, text: str, whole: bool = False) -> None:
        told = one_line(text, longest=_WHOLE if whole else _LINE)
        self._lines.put(f"[{_seconds(elapsed):>7}] {told}\n")

    def _print(self, line: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone; the run has not
            self._broken = True


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
        self._time = _Elapsed(folds, clock)
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
        if (text := self._news.of(at, event)) is not None:
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
        self._events.append(f"{_seconds(self._time.at(at)):>7}  {text}")

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
        left = f" · about {_seconds(notes.left_s)} left" if running and notes.left_s else ""
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(
            Text(notes.doing or f"step {notes.step}/{self._max_steps}", style="bold"),
            Bar(self._max_steps, 0, notes.step, color="green", bgcolor="grey23"),
            Text(f"{_seconds(self._time.now())}{left}", style="dim"),
        )
        title = Text(f" {folds.run.run_id or 'paceline'} ", style="bold")
        if not running:
            title.append(f"{folds.run.status} ", style="green" if folds.run.status == "done" else "yellow")
        body = [head, Text(""), self._numbers(notes), Text(""), tokens_bar(notes.tokens)]
        if notes.warnings:
            body += [
                Text(""),
                *(Text(one_line(text, longest=_WHOLE), style="yellow") for text in notes.warnings),
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
        left = [_trend(f"reward {env}".strip(), rewards) for env, rewards in notes.reward.items()]
        left += [_trend(_held_out(env), rewards) for env, rewards in notes.held_out.items()]
        right: list[tuple[str, RenderableType]] = [
            ("in flight", Text(f"{notes.in_flight[0]}{evals}{cap}, {notes.queued} queued")),
            (
                "staleness",
                Text(f"{_number(get('staleness/mean'))} mean, {_number(get('staleness/max'))} max"),
            ),
            ("tokens/s", Text(_number(get("throughput/sampled")))),
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


class News:
    """What people want to know of among thousands of events. A storm of failures is told now and then."""

    def __init__(self, failure_s: float = 5.0) -> None:
        self._failure_s = failure_s
        self._next_failure = 0.0
        self._untold = 0

    def of(self, at: float, event: Event) -> str | None:
        """One line about `event`, or None."""
        match event:
            case RolloutEnded():
                return self._failed(at, event.rollout) if event.rollout.outcome.ending == "failed" else None
            case RunOpened():
                again = "" if event.resumed_from is None else f", resumed from step {event.resumed_from}"
                return f"run {event.run_id} opened, seed {event.seed}{again}"
            case EngineJoined():
                return f"engine {event.info.id} joined with v{event.version}"
            case EngineLost():
                return f"engine {event.engine} {'leaves' if event.leaves else 'lost'}: {event.error}"
            case WeightsLoaded() if event.error is not None:
                return f"engine {event.engine} did not load v{event.version}: {event.error}"
            case CheckpointSaved():
                return f"checkpoint of step {event.step} saved in {event.seconds:.1f} s"
            case ShutdownRequested():
                return f"shutting down: {event.why}"
            case _:
                return None

    def _failed(self, at: float, rollout: Rollout) -> str | None:
        if at < self._next_failure:
            self._untold += 1
            return None
        self._next_failure = at + self._failure_s
        more = f" (and {self._untold} before it)" if self._untold else ""
        self._untold = 0
        outcome = rollout.outcome
        return f"{rollout.task.env} {rollout.id} failed ({outcome.cause}){more}: {outcome.detail}"


def row_text(row: Row, max_steps: int) -> str:
    """A row in one line."""
    get = row.values.get
    if row.kind == "eval":
        prefix = f"eval/{row.env}"
        passes = [
            f"  {name[len(prefix) + 1 :]} {value:.3f}"
            for name, value in row.values.items()
            if name.startswith(f"{prefix}/pass@")
        ]
        reward = _number(get(f"{prefix}/reward"), 3)
        count = int(get(f"{prefix}/rollouts", 0))
        return f"{_held_out(row.env)} at v{row.step}: reward {reward}{''.join(passes)}  ({count} rollouts)"
    if row.trained and all(name.startswith("trainer/") for name in row.values):
        return f"step {row.step}/{max_steps} trained again, from the batch on disk"
    share = get("goodput")
    return (
        f"step {row.step}/{max_steps}"
        f"{'' if row.trained else ' shipped, not trained'}"
        f"  reward {_number(get('train/all/reward'), 3)}{_by_env(row)}"
        f"  length {_number(get('train/all/length'))}"
        f"  staleness {_number(get('staleness/mean'))}/{_number(get('staleness/max'))}"
        f"  tokens/s {_number(get('throughput/sampled'))}"
        f"  goodput {'–' if share is None else f'{share:.0%}'}"
        f"  step time {_number(get('time/step_s'))} s"
    )


def _by_env(row: Row) -> str:
    """The rewards of a mixed run, one an environment."""
    ends = "/drawn_share"
    envs = [name[len("train/") : -len(ends)] for name in row.values if name.endswith(ends)]
    rewards = [f"{env} {_number(row.values.get(f'train/{env}/reward'), 3)}" for env in envs]
    return f" ({', '.join(rewards)})" if len(rewards) > 1 else ""


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


def _held_out(env: str) -> str:
    """What an eval is called, which may say so itself."""
    return env if "heldout" in env.replace("-", "") else f"held-out {env}"


def _trend(name: str, values: Sequence[float]) -> tuple[str, RenderableType]:
    if not values:
        return name, Text("–")
    text = Text(f"{values[-1]:.3f} ", style="bold")
    text.append(sparkline(values), style="green")
    if len(values) > 1:
        text.append(f" from {values[0]:.3f}", style="dim")
    return name, text


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def _seconds(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def one_line(text: str, longest: int = _LINE) -> str:
    """Printable and short: errors quote foreign text, and no control character of it may reach a terminal."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    return clean if len(clean) <= longest else f"{clean[:longest]}…"


class _Elapsed:
    """Seconds that a view shows: from its own start on, and not from the run's opening, so that the start-up counts
    and the clock never goes back; those of a resumed run's earlier lives are before that."""

    def __init__(self, folds: RunFolds, clock: Callable[[], float]) -> None:
        self._folds, self._clock = folds, clock
        self._from = clock() - folds.elapsed
        self._shift = 0.0
        """Between the run's clock since its opening, and this one."""
        self._stopped: float | None = None

    def now(self) -> float:
        return self._clock() - self._from if self._stopped is None else self._stopped

    def at(self, at: float) -> float:
        """A moment of the run's clock."""
        return at - (self._folds.run.opened_at or 0.0) + self._shift

    def opened(self, at: float) -> None:
        self._stopped, self._shift = None, 0.0
        self._shift = self.now() - self.at(at)

    def stop(self) -> None:
        self._stopped = self.now()


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
