"""Sinks may be slow, broken or hang; the run does not notice."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from observe.worlds import Shape, World
from paceline.errors import ConfigError
from paceline.observe.monitor import Monitor
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds
from paceline.observe.sinks import is_loopback, open_sinks
from paceline.observe.sinks.jsonl import JsonlSink
from paceline.observe.sinks.prometheus import PrometheusSink, series_of
from paceline.observe.sinks.pump import SinkPump

NOTHING = SimpleNamespace(prometheus=None, wandb=None, tensorboard=None)


def row(step: int = 1, **values: float) -> Row:
    return Row(kind="step", at=float(step), step=step, values=values or {"train/all/reward": 0.5})


class Kept:
    name = "kept"

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


class Broken(Kept):
    name = "broken"

    def write(self, row: Row) -> None:
        raise RuntimeError("no network")


class Hanging(Kept):
    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, row: Row) -> None:
        self.let_go.wait()


class FullDisk(Kept):
    name = "full"

    def write(self, row: Row) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    sink = Hanging()
    yield sink
    sink.let_go.set()


def test_s92_sinks_that_raise_hang_or_meet_a_full_disk_cost_rows_and_nothing_else(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(Shape(steps=5))
    kept = Kept()
    pump = SinkPump([Broken(), hanging, FullDisk(), kept], queue=64)
    folds = RunFolds(live=True)
    with caplog.at_level(logging.WARNING, "paceline.observe"):
        monitor = Monitor(folds, pump=pump)
        began = time.monotonic()
        for decision in world.decisions:
            monitor.apply(decision.at, decision.event, decision.commands)
        took = time.monotonic() - began
        pump.close(timeout_s=0.3)
    assert took < 2.0
    assert [r.step for r in kept.rows if r.kind == "step"][-1:] == [5]
    assert folds.training.steps[-1].step == 5
    assert pump.dropped["kept"] == 0
    for name in ("broken", "hanging", "full"):
        assert pump.dropped[name] > 0, name
        assert sum(f"sink {name}" in record.message for record in caplog.records) == 1, name


def test_a_warning_comes_again_only_after_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    pump = SinkPump([Broken()], warn_s=60.0, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "paceline.observe"):
        for at in (0.0, 30.0, 61.0, 62.0):
            now[0] = at
            before = pump.dropped["broken"]
            pump.put(row())
            deadline = time.monotonic() + 5
            while pump.dropped["broken"] == before and time.monotonic() < deadline:
                threading.Event().wait(0.001)
    pump.close()
    assert pump.dropped["broken"] == 4
    assert len(caplog.records) == 2


def test_a_slow_sink_loses_its_oldest_rows_and_its_queue_is_bounded(hanging: Hanging) -> None:
    pump = SinkPump([hanging], queue=8)
    for step in range(1000):
        pump.put(row(step))
    assert pump.dropped["hanging"] >= 1000 - 8 - 1
    pump.close(timeout_s=0.05)
    assert pump.dropped["hanging"] == 1000


def test_closing_writes_what_is_queued() -> None:
    kept = Kept()
    pump = SinkPump([kept])
    for step in range(100):
        pump.put(row(step))
    pump.close()
    assert [r.step for r in kept.rows] == list(range(100))


def test_a_fold_that_raises_switches_monitoring_off_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = Monitor(RunFolds(live=True))
    decision = World(Shape(steps=1)).decisions[0]
    with caplog.at_level(logging.ERROR, "paceline.observe"):
        for _ in range(3):
            monitor.apply(decision.at, decision.event, [None, *decision.commands])  # type: ignore[list-item]
            monitor._fold = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
    assert len(caplog.records) == 1


def test_metrics_jsonl_has_one_object_a_row_and_writes_what_is_not_finite_as_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(row(1, reward=0.5, loss=float("nan")))
    sink.write(Row(kind="now", at=1.0, step=1, values={"queued": 1}))
    sink.write(Row(kind="eval", at=2.0, step=1, env="held-out", values={"eval/held-out/reward": 0.25}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"kind": "step", "segment": 0, "step": 1, "at": 1.0, "reward": 0.5, "loss": None},
        {"kind": "eval", "segment": 0, "step": 1, "at": 2.0, "env": "held-out", "eval/held-out/reward": 0.25},
    ]


def scrape(url: str, token: str | None = None) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return str(reply.read().decode())


def test_prometheus_serves_the_newest_values_with_environments_as_labels() -> None:
    sink = PrometheusSink("127.0.0.1", 0)
    sink.write(
        row(
            3,
            **{"train/a/b/reward": 0.5, "train/all/reward": 0.25, "staleness/mean": 1.5, "trainer/loss": 2.0},
        )
    )
    sink.write(row(4, **{"train/all/reward": 0.75, "trainer/kl": float("nan")}))
    text = scrape(sink.url)
    sink.close()
    assert 'paceline_train_reward{env="a/b"} 0.5' in text
    assert 'paceline_train_reward{env="all"} 0.75' in text
    assert "paceline_staleness_mean 1.5" in text
    assert "paceline_trainer_loss 2.0" in text
    assert "paceline_step 4.0" in text
    assert "# HELP paceline_train_reward Mean reward of the scored rollouts of the window." in text
    assert "python_info" not in text  # a registry of its own


def test_prometheus_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="PACELINE_METRICS_TOKEN"):
        PrometheusSink("0.0.0.0", 0)
    sink = PrometheusSink("0.0.0.0", 0, token="secret")
    url = sink.url.replace("0.0.0.0", "127.0.0.1")
    for wrong in (None, "other"):
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            scrape(url, wrong)
        refused.value.close()
    sink.write(row())
    assert "paceline_step" in scrape(url, "secret")
    sink.close()


def test_prometheus_listens_on_ipv6_as_well() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    sink = PrometheusSink("::1", 0)
    sink.write(row())
    assert "paceline_step" in scrape(sink.url)
    sink.close()


def test_a_free_port_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    chosen = SimpleNamespace(host="127.0.0.1", port=0)
    choice = SimpleNamespace(prometheus=chosen, wandb=None, tensorboard=None)
    _, endpoint = open_sinks(tmp_path, choice, say=said.append)
    assert said == [f"metrics at {endpoint.url}"]  # type: ignore[attr-defined]
    endpoint.close()


def test_a_taken_port_is_a_config_error() -> None:
    first = PrometheusSink("127.0.0.1", 0)
    port = int(first.url.rsplit(":", 1)[1].partition("/")[0])
    with pytest.raises(ConfigError, match=str(port)):
        PrometheusSink("127.0.0.1", port)
    first.close()


def test_the_port_of_a_run_that_was_scraped_is_free_for_the_next_one() -> None:
    first = PrometheusSink("127.0.0.1", 0)
    port = int(first.url.rsplit(":", 1)[1].partition("/")[0])
    scrape(first.url)  # the server ends the connection, and its end of it stays for a while
    first.close()
    PrometheusSink("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True), ("0.0.0.0", False), ("::", False), ("box", False)],
)  # fmt: skip
def test_loopback_is_told_from_everything_else(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_an_undocumented_metric_still_has_a_prometheus_name() -> None:
    assert series_of("train/a/brand_new") == ("paceline_train_brand_new", {"env": "a"})
    assert series_of("eval/x/pass@4") == ("paceline_eval_pass_4", {"env": "x"})
    assert series_of("engine/e0/kv_usage") == ("paceline_engine_kv_usage", {"engine": "e0"})


def test_tensorboard_files_hold_each_value_with_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the tensorboard extra is not installed")
    from tensorboardX.proto.event_pb2 import Event

    from paceline.observe.sinks.tensorboard import TensorboardSink

    sink = TensorboardSink(tmp_path / "tb")
    sink.write(row(3, **{"train/all/reward": 0.5, "trainer/loss": 2.0}))
    sink.write(Row(kind="eval", at=4.0, step=2, env="x", values={"eval/x/reward": 0.25}))
    sink.write(Row(kind="now", at=5.0, step=3, values={"queued": 1.0}))
    sink.close()
    (file,) = (tmp_path / "tb").iterdir()
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):  # TFRecord: length, its checksum, the event, its checksum
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        at += 16 + length
    assert found == [("train/all/reward", 3, 0.5), ("trainer/loss", 3, 2.0), ("eval/x/reward", 2, 0.25)]


def test_wandb_gets_each_kind_of_row_with_an_axis_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logged: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=lambda **_: run))
    choice = SimpleNamespace(
        prometheus=None, tensorboard=None, wandb=SimpleNamespace(project="p", mode="offline")
    )
    _, sink = open_sinks(tmp_path, choice, run_name="r")
    sink.write(row(2))
    sink.write(Row(kind="eval", at=2.0, step=1, env="x", values={"eval/x/reward": 1.0}))
    sink.write(Row(kind="now", at=2.0, step=1, values={"queued": 1.0}))
    sink.close()
    assert [("step" in entry, "version" in entry) for entry in logged] == [(True, False), (False, True)]


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    choice = SimpleNamespace(prometheus=None, wandb=None, tensorboard=SimpleNamespace(subdir="tb"))
    with pytest.raises(ConfigError, match=r"paceline\[tensorboard\]"):
        open_sinks(tmp_path, choice)


def test_the_jsonl_file_is_always_written(tmp_path: Path) -> None:
    assert [sink.name for sink in open_sinks(tmp_path, NOTHING)] == ["jsonl"]
