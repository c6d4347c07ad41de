"""The live view: a panel on a terminal, lines on a pipe."""

from __future__ import annotations

import io
import threading
from typing import Any

import msgspec
import pytest
from rich.console import Console

from observe.told import Told
from observe.worlds import EnvShape, Shape, World, sample
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.commands import Command, FinishRun, NoteDead, NoteOutage, ShipBatch
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome, Rollout
from paceline.domain.task import TaskRef
from paceline.errors import EngineError
from paceline.observe.drawing import sparkline, spread
from paceline.observe.live import LiveView, open_view
from paceline.observe.monitor import Monitor
from paceline.observe.plain import PlainView
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds, held_out, summary
from paceline.observe.told import News, one_line, row_text
from paceline.testing import Plan, Script, setup_for
from paceline.testing import World as CoreWorld


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
    steps = [line.partition("] ")[2].split()[:2] for line in lines if "/4 " in line]
    assert steps == [["step", f"{n}/4"] for n in range(1, 5)]
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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drawn(view: LiveView, width: int = 110) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width).print(view.panel())
    return shown.getvalue()


def test_the_start_is_shown_by_its_phases_and_the_clock_never_jumps() -> None:
    clock, folds, out = Clock(), RunFolds(live=True), io.StringIO()
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view = LiveView(folds, console, max_steps=8, clock=clock)
    plain = PlainView(folds, out, max_steps=8, clock=clock)
    for each in (view, plain):
        each.phase("starting the engine, starting the trainer")
    clock.now += 7
    assert "starting the engine, starting the trainer" in drawn(view)
    assert "step 0" not in drawn(view)
    assert "7.0s" in drawn(view)
    began, last = clock.now, 0.0
    for decision in World(Shape(steps=3)).decisions:
        clock.now = began + decision.at
        at = folds.apply(decision.at, decision.event, decision.commands)
        for each in (view, plain):
            each.decided(at, decision.event, decision.commands)
        shown = view._time.now()
        assert shown >= max(last, 7.0), "the clock went back"
        last = shown
        if not folds.training.steps:
            assert "step 0" not in drawn(view)
    view.close()
    plain.close()
    lines = out.getvalue().splitlines()
    assert "[   0.0s] starting the engine" in lines[0]
    assert "[   7.0s] run demo opened" in lines[1]


def test_a_mixed_run_shows_the_reward_of_each_environment() -> None:
    out, views = io.StringIO(), []
    console = Console(file=io.StringIO(), force_terminal=True, width=110)

    def both(folds: RunFolds) -> LiveView:
        folds.training.listen(PlainView(folds, out, max_steps=4).row)
        views.append(LiveView(folds, console, max_steps=4, clock=lambda: 0.0))
        return views[0]

    mixed = (EnvShape("reverse-text"), EnvShape("arithmetic"))
    folds = watch(World(Shape(steps=4, envs=mixed)), both)
    names = sorted({env for env, split in folds.lives.tallies if split == "train"})
    assert len(names) > 1
    row = folds.training.steps[-1]
    text, told = drawn(views[0]), row_text(row, 4)
    for name in names:
        assert f"reward {name}" in text
        assert f"{name} {row.values[f'train/{name}/reward']:.3f}" in told


def test_dead_groups_are_told_in_the_panel_and_in_the_lines_until_one_trains() -> None:
    folds, out = RunFolds(live=True), io.StringIO()
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view, plain = LiveView(folds, console, max_steps=8), PlainView(folds, out, max_steps=8)
    said = [NoteDead("mine", 32, "32 groups in a row brought nothing to train: " + "why " * 60 + "do this")]
    for each in (view, plain):
        each.decided(100.0, on.TimerFired(), said)
    assert "do this" in " ".join(drawn(view).split())
    for each in (view, plain):
        each.decided(200.0, on.TimerFired(), [NoteDead("mine", 0, "a group of it trains again")])
    assert "do this" not in drawn(view)
    view.close()
    plain.close()
    assert "warning: 32 groups" in out.getvalue()
    assert "do this" in out.getvalue()


def test_an_outage_is_told_in_the_panel_and_in_the_lines_until_it_is_over() -> None:
    folds, out = RunFolds(live=True), io.StringIO()
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view, plain = LiveView(folds, console, max_steps=8), PlainView(folds, out, max_steps=8)
    for each in (view, plain):
        each.decided(100.0, on.TimerFired(), [NoteOutage("mine", True, "env 'mine' is out: 503")])
    assert "env 'mine' is out: 503" in drawn(view)
    for each in (view, plain):
        each.decided(200.0, on.TimerFired(), [NoteOutage("mine", False, "env 'mine' is back after 100 s")])
    assert "503" not in drawn(view)
    view.close()
    plain.close()
    assert "warning: env 'mine' is out: 503" in out.getvalue()
    assert "env 'mine' is back after 100 s" in out.getvalue()


def test_a_step_that_was_shipped_and_not_trained_is_told_as_that() -> None:
    told = Told()
    [rollout] = told.start(0)
    told.end(rollout)
    told.process([told.verdict(rollout)])
    cut = Batch(1, (sample(told.rollouts[rollout]),), (rollout,))
    told.tell(on.TimerFired(), ShipBatch(cut))
    told.tell(on.BatchShipped(1, 100, 0.1, 0.2))
    told.tell(on.ShutdownRequested("Ctrl-C"), FinishRun("stopped", "Ctrl-C"))
    folds = told.folds
    [row] = folds.training.steps
    assert not row.trained
    assert row.flat()["trained"] is False
    assert "step 1/4 shipped, not trained" in row_text(row, 4)
    assert summary(folds)["steps"] == 0
    assert Row(kind="step", at=0.0, step=1, values={}).flat().get("trained", True)


def test_a_step_that_is_trained_again_after_a_kill_is_told_without_empty_numbers() -> None:
    told = row_text(Row(kind="step", at=0.0, segment=1, step=2, values={"trainer/loss": 0.1}), 4)
    assert told == "step 2/4 trained, from the batch that an earlier life shipped"


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
        told = news.of(at, on.RolloutEnded(Rollout(id=RolloutId(0, 0), task=task, outcome=outcome)), [])
        return told[0] if told else None

    told = [failed(at / 10) for at in range(100)]
    assert sum(text is not None for text in told) == 2
    assert "(and 49 before it)" in (told[50] or "")


def test_an_engine_that_is_not_used_any_more_is_told_with_how_long_the_run_waits() -> None:
    """Whether it is said to be lost, or its calls fail."""
    told: list[str] = []
    news = News()

    def watch(world: Any, event: Event, commands: list[Command]) -> None:
        told.extend(news.of(world.now, event, commands))

    def dies(way: str) -> list[str]:
        told.clear()
        script = Script(plan=lambda *_: Plan(call_error="boom" if way == "calls" else None))
        setup = msgspec.structs.replace(setup_for(), engine_wait_s=50.0)
        world = CoreWorld(setup, script, cap=2, watch=watch)
        if way == "lost":
            world.lose("e0", "boom")
        with pytest.raises(EngineError, match="no engine has been usable for 50 s"):
            world.run()
        return [line for line in told if "engine" in line][-2:]

    waits = "no engine is usable; the run waits 50 s for one"
    assert dies("lost") == ["engine e0 lost: boom", waits]
    assert dies("calls") == [
        "engine e0 is taken out until it answers again: 3 calls in a row failed, the last: boom",
        waits,
    ]


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
