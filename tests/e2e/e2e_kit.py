"""Whole runs for tests: as a process of its own, or in this one with engine and trainer beside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from paceline.domain.events import Event
from paceline.journal import read_journal
from paceline.journal.reader import Record
from paceline.transport.layout import ACKS, BATCHES, WEIGHTS, steps_in, versions_in
from paceline.transport.status import RunStatus, read_status

HERE = Path(__file__).parent
MODEL = "pkg:paceline/assets/small_policy"
BASE: dict[str, Any] = {
    "run.name": "t",
    "run.max_steps": 3,
    "model.name": MODEL,
    "sampling.max_tokens": 12,
    "env.0.id": "reverse-text",
    "env.0.group_size": 4,
    "engine.kv_tokens": 4096,
    "engine.max_num_seqs": 32,
    "admission.cap": 32,
    "batch.rollouts": 16,
    "batch.seq_len": 128,
    "batch.micro_batch_tokens": 2048,
    "trainer.lr": 5e-4,
    "checkpoint.every": 1,
}
_PATH = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
_ENVIRONMENT = {**os.environ, "PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1"}


def flags(**options: Any) -> list[str]:
    """The base config with changes, as flags; `__` stands for the dot."""
    chosen = BASE | {name.replace("__", "."): value for name, value in options.items()}
    if chosen.get("engine.type", "embedded") != "embedded":
        chosen = {k: v for k, v in chosen.items() if k not in ("engine.kv_tokens", "engine.max_num_seqs")}
    if chosen.get("trainer.type") == "external":
        chosen.pop("trainer.lr")
    return [f"--{name}={_text(value)}" for name, value in chosen.items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


RUNNING: list[subprocess.Popen[bytes]] = []
"""Started by a test; ended with it, whatever becomes of it."""


class CommandLine:
    """`paceline run` in a process (and process group) of its own."""

    def __init__(self, root: Path, *words: str, **options: Any) -> None:
        self.run_dir = root / "t"
        config = root / "empty.toml"
        config.touch()
        # Each process its own: two of one run directory may be alive at a time.
        life = sum(1 for _ in root.glob("stderr-*.txt"))
        self._out, self._err = root / f"stdout-{life}.txt", root / f"stderr-{life}.txt"
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            str(config),
            *words,
            "--summary",
            "json",
            "--plain",
        ]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *flags(run__dir=str(root), **options)],
                stdout=out,
                stderr=err,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        RUNNING.append(self.process)

    @property
    def said(self) -> str:
        return self._err.read_text()

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._out.read_text().splitlines()[-1])
        return found

    @property
    def status(self) -> RunStatus:
        found = read_status(self.run_dir)
        assert found is not None
        return found

    def children(self) -> list[psutil.Process]:
        """All that it started, however deep; with the keepers, which have no parent but share a group."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        groups = {os.getpgid(child.pid) for child in found} - {self.process.pid}
        return [p for p in psutil.process_iter() if _group_of(p) in groups]

    def child(self, module: str) -> psutil.Process:
        """The process of its own that runs this module: the leader of its group."""
        return next(c for c in self.children() if module in c.cmdline() and os.getpgid(c.pid) == c.pid)

    def when(self, happens: Callable[[], bool], within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while not happens():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < deadline, f"not within {within_s:g} s:\n{self.said}"
            time.sleep(0.02)

    def when_opened(self) -> None:
        self.when(lambda: "opened" in self.said)

    def when_trained(self, step: int) -> None:
        self.when(lambda: bool(steps_in(self.run_dir / ACKS)[-1:] >= [step]))

    def end(self, within_s: float) -> int:
        """Its exit code, in time and with nothing left of it."""
        children = self.children() if self.process.poll() is None else []
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            for process in (*children, psutil.Process(self.process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise AssertionError(f"still there after {within_s:g} s:\n{self.said}") from None
        gone(children, within_s=1.0)
        return code

    def interrupt(self, *signals: signal.Signals, whole_group: bool = False) -> None:
        for number in signals:
            if whole_group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def gone(processes: list[psutil.Process], within_s: float) -> None:
    """All have ended in time; zombies that nobody reaps count as ended."""
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if _is_alive(process)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def trainer(
    run_dir: Path, model: Path, *, ranks: int = 1, how: str = "well"
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The numpy trainer, one process a rank. They must all have ended well by the end."""
    script = str(HERE / "e2e_trainer.py")
    started = [
        subprocess.Popen([sys.executable, script, str(run_dir), str(rank), str(model), how], env=_ENVIRONMENT)
        for rank in range(ranks)
    ]
    try:
        yield started
        assert [process.wait(10) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
            process.wait()


def records(run_dir: Path) -> list[Record]:
    return list(read_journal(run_dir))


def events(run_dir: Path, kind: type[Event]) -> list[Any]:
    return [record.event for record in read_journal(run_dir) if type(record.event) is kind]


def acknowledged(run_dir: Path) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    return {
        step: msgspec.json.decode((run_dir / ACKS / f"step_{step:06d}.json").read_bytes())["metrics"]
        for step in steps_in(run_dir / ACKS)
    }


def numbers(run_dir: Path) -> tuple[list[int], list[int], list[int]]:
    """Steps shipped, steps acknowledged, versions published, as far as they are kept."""
    return steps_in(run_dir / BATCHES), steps_in(run_dir / ACKS), versions_in(run_dir / WEIGHTS)
