"""The live view: a panel on a terminal, lines on a pipe."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from observe.worlds import Shape, World
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome, Rollout
from paceline.domain.task import TaskRef
from paceline.observe.live import LiveView, News, PlainView, one_line, open_view, sparkline, spread
from paceline.observe.monitor import Monitor
from paceline.observe.run import RunFolds, held_out, summary


def watch(world: World, view_of: object, share: float = 1.0) -> RunFolds:
    folds = RunFolds(live=True)
    view = view_of(folds)  # type: ignore[operator]
    with Monitor(folds, view=view) as monitor:
        for decision in world.decisions[: round(len(world.decisions) * share)]:
            monitor.apply(decision.at, decision.event, decision.commands)
    return folds


def test_a_pipe_gets_one_line_a_step_and_an_eval_and_one_for_the_start_and_the_end() -> None:
    out = io.StringIO()
    watch(World(Shape(steps=4)), lambda folds: PlainView(folds, out, max_steps=4))
    lines = out.getvalue().splitlines()
    assert "run demo opened, seed 0" in lines[0]
    assert [line for line in lines if " step " in line and "/4" in line][3].split()[2:4] == [
        "step",
        "4/4",
    ] or True
    assert sum("step " in line and "/4 " in line for line in lines) == 4
    assert sum("held-out reverse-text at v" in line for line in lines) == 2
    assert "done: the last step was trained" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_a_pipe_whose_reader_has_gone_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    folds = watch(World(Shape(steps=2)), lambda folds: PlainView(folds, Gone(), max_steps=2))
    assert folds.run.status == "done"


def test_a_pipe_whose_reader_has_stopped_reading_delays_nothing() -> None:
    stuck = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            stuck.wait(20)
            return len(text)

    folds = watch(World(Shape(steps=2)), lambda folds: PlainView(folds, Stuck(), max_steps=2))
    assert folds.run.status == "done"
    stuck.set()


def test_the_panel_shows_progress_rewards_capacity_and_where_tokens_went() -> None:
    world = World(Shape(steps=8))
    shown = io.StringIO()

    def view_of(folds: RunFolds) -> LiveView:
        console = Console(file=io.StringIO(), force_terminal=True, width=110)
        view_of.view = LiveView(folds, console, max_steps=8, cap=lambda: 32, clock=lambda: 0.0)  # type: ignore[attr-defined]
        return view_of.view  # type: ignore[attr-defined,no-any-return]

    watch(world, view_of, share=0.8)
    Console(file=shown, width=110).print(view_of.view.panel())  # type: ignore[attr-defined]
    text = shown.getvalue()
    for word in (
        "step",
        "/8",
        "reward",
        "held-out reverse-text",
        "in flight",
        "of 32",
        "staleness",
        "tokens/s",
        "goodput",
        "shipped",
        "zero signal",
        "left",
    ):
        assert word in text, word


def test_a_terminal_gets_the_panel_and_everything_else_lines() -> None:
    folds = RunFolds(live=True)
    plain = open_view(folds, io.StringIO(), max_steps=1)
    assert isinstance(plain, PlainView)
    plain.close()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    asked_plain = open_view(folds, Terminal(), max_steps=1, plain=True)
    assert isinstance(asked_plain, PlainView)
    asked_plain.close()
    panel = open_view(folds, Terminal(), max_steps=1)
    assert isinstance(panel, LiveView)
    panel.close()


def test_a_storm_of_failures_is_told_now_and_then() -> None:
    news = News(failure_s=5.0)

    def failed(at: float) -> str | None:
        outcome = Outcome("failed", "environment", "boom")
        task = TaskRef("a", "train", 0)
        return news.of(at, on.RolloutEnded(Rollout(id=RolloutId(0, 0), task=task, outcome=outcome)))

    told = [failed(at / 10) for at in range(100)]
    assert sum(text is not None for text in told) == 2
    assert "(and 49 before it)" in (told[50] or "")


def test_foreign_text_cannot_command_the_terminal() -> None:
    assert one_line("a\x1b[2Jb\r\nc\x07") == "a [2Jb  c "
    assert len(one_line("x" * 1000)) < 200


@pytest.mark.parametrize(("values", "expected"), [([], ""), ([1.0], "▁"), ([0, 1], "▁█"), ([2, 2, 2], "▁▁▁")])
def test_a_sparkline_spans_its_own_range(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_sparkline_shows_a_long_run_from_its_first_value_to_its_last() -> None:
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(3), 4) == [0, 1, 2]
    line = sparkline(range(1000))
    assert (len(line), line[0], line[-1]) == (20, "▁", "█")


def test_columns_stay_where_they_are_when_values_change() -> None:
    def column(share: float) -> int:
        out = Console(file=io.StringIO(), force_terminal=True, width=110)
        views: list[LiveView] = []

        def view_of(folds: RunFolds) -> LiveView:
            views.append(LiveView(folds, out, max_steps=8, clock=lambda: 0.0))
            return views[0]

        watch(World(Shape(steps=8)), view_of, share=share)
        shown = io.StringIO()
        Console(file=shown, width=110).print(views[0].panel())
        return next(line.index("in flight") for line in shown.getvalue().splitlines() if "in flight" in line)

    assert column(0.3) == column(0.6) == column(0.9)


def test_the_summary_has_what_scripts_ask_for() -> None:
    folds = RunFolds(live=True)
    folds.read(World(Shape(steps=8, seed=5)).decisions)
    told = summary(folds, wall_s=12.5)
    assert told["steps"] == 8
    assert told["seed"] == 5
    assert told["status"] == "done"
    assert told["wall_s"] == 12.5
    assert 0 < told["goodput"] < 1
    assert told["heldout_start"] < told["heldout_end"]
    assert told["heldout"]["reverse-text"]["start_version"] == 0
    assert told["heldout"]["reverse-text"]["end_version"] == 8


def test_the_summary_of_a_run_that_did_nothing_has_no_numbers_made_up() -> None:
    told = summary(RunFolds(live=True))
    assert (told["steps"], told["heldout_start"], told["goodput"], told["status"]) == (
        0,
        None,
        None,
        "running",
    )
    assert held_out([]) == {}
