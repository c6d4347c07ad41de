"""The report: one file, safe to open, that shows the run."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from observe.browser import Tab
from observe.told import Told
from observe.worlds import EnvShape, Shape, World
from paceline.cli import export, report
from paceline.cli.main import main
from paceline.domain.events import RolloutEnded
from paceline.domain.rollout import Message
from paceline.errors import ConfigError, PacelineError, WireError
from paceline.journal import FileJournal
from paceline.observe.report import Extras, embedded_json, render
from paceline.observe.report.data import MAX_POINTS, in_flight, latest, report_data
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds
from paceline.observe.spans import Spans
from paceline.observe.trace import trace_events

GUESS = EnvShape("guess-number", turns=(1, 4), tokens=(2.2, 0.4), wait_s=0.4, start=0.3, end=0.8)
REVERSE = EnvShape("reverse-text")
EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>\u2028 \ud800 {{script}}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def folded(shape: Shape) -> RunFolds:
    folds = RunFolds()
    folds.read(World(shape).decisions)
    return folds


def evil_folds() -> RunFolds:
    """A run whose names and messages all try to break out."""
    folds = RunFolds()
    env = EnvShape(EVIL)
    for decision in World(Shape(envs=(env,), evals=(env,), steps=2)).decisions:
        event = decision.event
        if isinstance(event, RolloutEnded):
            messages = (Message("user", EVIL), Message(EVIL, EVIL))
            event = RolloutEnded(msgspec.structs.replace(event.rollout, messages=messages))
        folds.apply(decision.at, event, decision.commands)
    return folds


def data_in(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_nothing_that_a_model_wrote_can_end_the_data_or_run() -> None:
    page = render(evil_folds(), Extras(name=EVIL, config=EVIL, footer=EVIL))
    assert page.count("<script") == 2  # the data and the script; noscript is neither
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "onerror" in page  # it is there, as text
    shown = data_in(page)
    assert shown["config"] == EVIL.replace("\ud800", "\ufffd")
    page.encode("utf-8")  # would raise for a lone surrogate


def test_embedded_json_reads_back_and_has_no_markup() -> None:
    text = embedded_json({"a": EVIL, "b": [1, None, "&amp;"]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": EVIL.replace("\ud800", "\ufffd"), "b": [1, None, "&amp;"]}


def test_the_page_loads_nothing_and_lets_no_other_script_run() -> None:
    page = render(folded(Shape(steps=2)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    outside = [
        url for url in re.findall(r"https?://[^\s\"'<>)]+", page) if url != "http://www.w3.org/2000/svg"
    ]
    assert outside == []
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_the_data_of_a_long_run_is_shortened_and_stays_finite() -> None:
    folds = RunFolds()
    for step in range(1, 5001):
        values = {
            "train/all/reward": step / 5000,
            "staleness/max": float(step % 3),
            "trainer/loss": float("nan"),
        }
        folds.training.steps.append(Row(kind="step", at=float(step), step=step, values=values))
    data = report_data(folds, Extras())
    assert len(data["steps"]) == MAX_POINTS
    assert data["steps"][-1] == 5000
    assert set(data["series"]["trainer/loss"]) == {None}
    assert set(data["series"]["staleness/max"]) == {2.0}
    json.dumps(data, allow_nan=False)


def test_steps_that_a_resumption_repeats_replace_those_before() -> None:
    rows = [
        Row(kind="step", at=float(i), segment=s, step=n, values={})
        for i, (s, n) in enumerate([(0, 1), (0, 2), (1, 2), (1, 3)])
    ]
    assert [(row.segment, row.step) for row in latest(rows)] == [(0, 1), (1, 2), (1, 3)]


def test_a_step_that_is_trained_again_from_disk_keeps_what_its_cut_told() -> None:
    cut = Row(kind="step", at=1.0, segment=0, step=3, values={"batch/rollouts": 8, "train/all/reward": 0.5})
    again = Row(kind="step", at=2.0, segment=1, step=3, values={"trainer/loss": 0.1})
    assert [row.values for row in latest([cut, again])] == [cut.values | again.values]
    assert latest([again, cut]) == [cut]


def test_the_timeline_has_the_last_steps_and_every_moment_of_their_rollouts() -> None:
    folds = folded(Shape(envs=(REVERSE, GUESS), steps=8, engines=2))
    timeline = report_data(folds, Extras())["timeline"]
    assert [step["step"] for step in timeline["steps"]] == [4, 5, 6, 7, 8]
    assert {lane[5] for lane in timeline["lanes"]} == {"e0", "e1"}
    for lane in timeline["lanes"]:
        start, end, turns = lane[7], lane[8], lane[13]
        assert 0 <= start <= end <= timeline["span"]
        moments = [moment for turn in turns for moment in turn[:3] if moment is not None]
        assert moments == sorted(moments)
        assert all(start <= moment <= end for moment in moments)
    peak = max(count for _, count in timeline["in_flight"])
    assert 0 < peak <= 32


def test_spans_keep_the_lanes_of_the_last_steps_only() -> None:
    world = World(Shape(steps=10))
    few, every = Spans(steps=2), Spans(steps=None)
    for decision in world.decisions:
        few.apply(decision.at, decision.event, decision.commands)
        every.apply(decision.at, decision.event, decision.commands)
        assert len(few.steps) <= 3
    assert 0 < len(few.lanes()) < len(every.lanes())
    assert all(lane.ended is not None and lane.ended >= few.since for lane in few.lanes())
    started = sum(type(c).__name__ == "StartRollout" for d in world.decisions for c in d.commands)
    assert len(every.lanes()) == started


def test_a_call_that_took_several_requests_is_one_turn_of_the_timeline() -> None:
    told = Told()
    (rollout,) = told.start(0)
    told.call(rollout, 4, context=10)
    told.call(rollout, 0, context=14)  # parked before it began
    told.call(rollout, 6, context=14)
    told.call(rollout, 5, context=25)  # five new tokens were said to it
    told.end(rollout, 15)
    (lane,) = report_data(told.folds, Extras())["timeline"]["lanes"]
    assert [turn[7] for turn in lane[13]] == [0, 1, 1, 0]
    calls = [e["args"]["turn"] for e in trace_events(told.folds.spans) if e["name"] == "model"]
    assert calls == [0, 0, 0, 1]


def test_spans_never_hold_more_lanes_than_they_may() -> None:
    spans = Spans(steps=None, max_lanes=20)
    for decision in World(Shape(steps=4)).decisions:
        spans.apply(decision.at, decision.event, decision.commands)
    assert len(spans.lanes()) <= 20
    assert spans.dropped > 0


def test_in_flight_counts_rollouts_between_their_start_and_their_end() -> None:
    folds = folded(Shape(steps=2))
    curve = in_flight(folds.spans.lanes(), 0.0)
    assert curve[-1][1] == 0
    assert max(count for _, count in curve) == 32


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    """A run directory of a run with two environments."""
    path = tmp_path / "my-run"
    path.mkdir()
    (path / "config.toml").write_text('[model]\nname = "tiny"\n[batch]\nrollouts = 32\n')
    journal = FileJournal(path, "demo")
    for decision in World(Shape(envs=(REVERSE, GUESS), evals=(REVERSE, GUESS), steps=6)).decisions:
        journal.append(decision.at, decision.event, decision.commands)
    await journal.close()
    return path


def command(module: object, *words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    code: int = module.run(parser.parse_args(words))  # type: ignore[attr-defined]
    return code


async def test_paceline_report_writes_the_report_of_a_run_directory(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(report, str(run_dir), "--summary", "json") == 0
    path, told = capsys.readouterr().out.splitlines()
    assert Path(path) == run_dir / "report.html"
    assert json.loads(told)["steps"] == 6
    shown = data_in((run_dir / "report.html").read_text())
    assert ["model", "tiny"] in shown["facts"]["lines"]  # type: ignore[index]
    assert shown["facts"]["name"] == "my-run"  # type: ignore[index]
    conversations = shown["conversations"]
    assert conversations
    assert conversations[0]["messages"][0][1].startswith("Write this word backwards")  # type: ignore[index]
    assert [name for name in os.listdir(run_dir) if name.startswith(".")] == []  # no draft is left behind


async def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="journal"):
        report.make_report(tmp_path)


async def test_paceline_export_writes_a_trace_and_a_table(run_dir: Path, tmp_path: Path) -> None:
    import csv
    import gzip

    trace, table = tmp_path / "trace.json.gz", tmp_path / "metrics.csv"
    assert command(export, str(run_dir), "--trace", str(trace), "--metrics", str(table)) == 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"model", "gate", "environment", "load v1", "train step 1"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kind"] == "step"] == [str(step) for step in range(1, 7)]
    assert float(rows[-1]["at"]) > 0


async def test_rollouts_of_one_row_of_a_trace_do_not_overlap(run_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command(export, str(run_dir), "--trace", str(trace))
    ends: dict[int, int] = {}
    rollouts = [
        e
        for e in json.loads(trace.read_text())["traceEvents"]
        if e["ph"] == "X" and "ending" in e.get("args", {})
    ]
    for event in sorted(rollouts, key=lambda event: event["ts"]):
        assert event["ts"] >= ends.get(event["tid"], 0) - 1  # microseconds are rounded
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert len(ends) <= 32


@pytest.mark.parametrize(
    ("module", "words"),
    [(report, ("-o", "no/r.html")), (export, ("--trace", "no/t.json")), (export, ("--metrics", "no/m.csv"))],
)
async def test_a_place_that_cannot_be_written_is_named_with_the_remedy(
    run_dir: Path, tmp_path: Path, module: object, words: tuple[str, str]
) -> None:
    place = tmp_path / words[1]
    with pytest.raises(PacelineError, match=rf"{re.escape(str(place))}.*No such file.*name another"):
        command(module, str(run_dir), words[0], str(place))


@pytest.mark.parametrize("words", ["report RUN --timeline-steps -3", "export RUN --trace t --steps 0"])
def test_fewer_than_one_step_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "is no whole number of at least 1" in capsys.readouterr().err


async def test_exporting_nothing_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        command(export, str(run_dir))


# --- in a real browser ------------------------------------------------------------------------------------------

BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install it to open the report for real")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]


def browse(url: str, profile: Path, *flags: str) -> tuple[str, str]:
    """The DOM after the scripts ran, and what the console said."""
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1400,2400", *flags, "--dump-dom", url],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


class Counting(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.browser
@BROWSER
def test_a_browser_draws_the_report_without_errors_and_asks_for_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "site" / "report.html"
    page.parent.mkdir()
    page.write_text(
        render(folded(Shape(envs=(REVERSE, GUESS), evals=(REVERSE, GUESS), steps=12)), Extras(config="[run]"))
    )
    Counting.asked = []
    handler = functools.partial(Counting, directory=str(page.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dom, console = browse(f"http://127.0.0.1:{server.server_port}/report.html", tmp_path / "profile")
        server.shutdown()
    assert console == ""
    assert Counting.asked == ["/report.html"]
    assert dom.count("<svg") >= 15
    assert dom.count("<canvas") == 1
    assert "Token account" in dom
    assert "✓ conserved" in dom


@pytest.mark.browser
@BROWSER
def test_a_browser_shows_hostile_text_as_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(evil_folds(), Extras(name=EVIL, config=EVIL)), encoding="utf-8")
    dom, console = browse(page.as_uri(), tmp_path / "profile")
    assert console == ""
    assert "owned</title>" not in dom
    assert "<img" not in dom
    assert "&lt;/script&gt;&lt;img" in dom


@pytest.mark.browser
@BROWSER
async def test_a_reader_can_hover_zoom_and_choose_an_environment(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    folds = folded(Shape(envs=(REVERSE, GUESS), evals=(REVERSE, GUESS), steps=12))
    page.write_text(render(folds))
    assert CHROMIUM
    async with Tab(CHROMIUM, tmp_path / "profile", page.as_uri()) as tab:
        tip = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"
        await tab.move("svg", 0.5, 0.5)
        assert "train" in await tab.value(tip)
        lane = await tab.point_of_a_lane()
        await tab.move("canvas", *lane)
        assert "ended" in await tab.value(tip)
        before = await tab.value("document.querySelector('canvas').toDataURL()")
        await tab.drag("canvas", 0.3, 0.5)
        assert await tab.value("document.querySelector('canvas').toDataURL()") != before
        choose = "const s = document.querySelector('select'); s.value = 'guess-number'; s.dispatchEvent(new Event('change'))"
        await tab.value(f"(() => {{ {choose}; return 1 }})()")
        await tab.value("document.querySelector('header button').click()")
        assert await tab.value("document.documentElement.dataset.theme") in ("light", "dark")
        assert tab.complaints == []
