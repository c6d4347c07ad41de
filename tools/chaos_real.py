"""Kills the real thing: the demo, with its orchestrator, engine, environment worker and trainer SIGKILLed at random.

    make chaos-real KILLS=6
    .venv/bin/python tools/chaos_real.py --kills 6 --seed 3 -- --run.max-steps 10

The moments are spread over the steps of the run, and drawn from the seed; what they hit depends on the clock. When a
kill ends the run (that of an engine or a worker that was ready must not), `--resume` goes on. After the last one the run must finish. The journal
of all lives is then looked at; see "How it is tried" in `docs/recovery.md`. Exits with 1 when a rule does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.errors import PacelineError
from paceline.journal import read_journal
from paceline.journal.reader import Record
from paceline.observe.run import RunFolds, summary
from paceline.transport.layout import ACKS, steps_in

RUNS = {
    "engine": "paceline.engines.embedded",
    "trainer": "paceline.trainer",
    "worker": "paceline/envs/workers/start.py",
}
"""What the children of a run are known by: a word of their command line ends so."""
SURVIVED = ("engine", "worker")
"""Whose death the run outlives, once it has begun."""
WORDS = ("--env.0.workers.type=process",)
"""Options of every run: the environment is in a process of its own, which can be killed."""
_LAST_STEPS = 2
"""Without kills, so that there is something left to do after the last one."""
_POLL_S = 0.02


class Kill(NamedTuple):
    who: str
    step: int
    """Steps that the trainer had acknowledged."""
    ended: frozenset[RolloutId]
    """Rollouts that had ended, by the journal on disk right after it."""
    quiet_s: float
    """From the journal's last write to the kill: where records come all the time, the window of what is lost."""


class Failed(Exception):
    """The run did not do what it must."""


def logs_of(run_dir: Path) -> list[Path]:
    """Files of the journal's records, oldest first."""
    return sorted((run_dir / "journal").glob("*.log"))


class Life:
    """The process of the run, from its start to its end."""

    def __init__(self, config: Path, root: Path, words: list[str], run_dir: Path | None) -> None:
        self.root = root
        self._earlier_logs = 0 if run_dir is None else len(logs_of(run_dir))
        again = [] if run_dir is None else [f"--resume={run_dir}"]
        self.log, self.out = root / "said.txt", root / "summary.txt"
        with self.log.open("ab") as log, self.out.open("wb") as out:
            command = [sys.executable, "-m", "paceline", "run", str(config), *again, *words]
            self.process = subprocess.Popen(
                [*command, *WORDS, f"--run.dir={root / 'runs'}", "--plain", "--summary=json"],
                stdout=out,
                stderr=log,
                start_new_session=True,
            )

    def has_begun(self, run_dir: Path) -> bool:
        """Whether its engines and workers were ready: the first record of a life comes behind them, in a file of its own."""
        return len(logs_of(run_dir)) > self._earlier_logs

    def child(self, who: str) -> int | None:
        """The process of that kind nearest to the run's own; None while there is none."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        for child in children:
            try:
                if any(word.endswith(RUNS[who]) for word in child.cmdline()):
                    return int(child.pid)
            except psutil.Error:
                continue
        return None

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class Chaos:
    """One run, its lives and its kills."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.args, self.root, self.random = args, root, Random(args.seed)
        self.life = Life(args.config, root, args.words, None)
        self.lives = 1
        self.kills: list[Kill] = []
        self._hit = False
        """Whether a child of this life was killed last, before the life had begun."""

    def run(self) -> Path:
        """Kill as often as asked, let it finish; the run's directory. Failed when it does not."""
        run_dir = self._when(
            lambda: next((self.root / "runs").glob("*/status.json"), None), "a run directory"
        ).parent
        steps = json.loads((run_dir / "status.json").read_text())["steps"]
        last = max(0, steps - _LAST_STEPS - 1)
        for step in sorted(self.random.randint(0, last) for _ in range(self.args.kills)):
            who = self.random.choice(("orchestrator", *RUNS))
            wait = self.random.uniform(0.0, self.args.within)
            self._when(lambda step=step: self._acknowledged(run_dir) >= step, f"step {step}")
            time.sleep(wait)
            self._kill(run_dir, who)
            if who not in SURVIVED:
                self.life.process.wait(self.args.patience)
                self._go_on(run_dir)
        while True:
            try:
                code = self.life.process.wait(self.args.patience)
            except subprocess.TimeoutExpired:
                raise Failed(
                    f"it did not finish within {self.args.patience:g} s:\n{self.life.last_words()}"
                ) from None
            if code == 0:
                return run_dir
            if not self._was_starting():
                raise Failed(f"it ended with code {code}:\n{self.life.last_words()}")
            self._go_on(run_dir)

    def _go_on(self, run_dir: Path) -> None:
        self.life = Life(self.args.config, self.root, self.args.words, run_dir)
        self.lives += 1
        self._hit = False

    def _was_starting(self) -> bool:
        """Whether what was killed last may have ended the run: a child that was still being started. Any other it outlives."""
        hit, self._hit = self._hit, False
        return hit

    def close(self) -> None:
        """Nothing is left running."""
        if self.life.process.poll() is None:
            self.life.process.kill()  # its children see that it is gone, and end
            self.life.process.wait()

    def _kill(self, run_dir: Path, who: str) -> None:
        if who == "orchestrator":
            pid = self.life.process.pid
        else:  # of this life, or of the next, if it is just ending
            pid = self._when(lambda: self.life.child(who), f"the {who}")
        step, now = self._acknowledged(run_dir), time.time()
        os.kill(pid, signal.SIGKILL)
        self._hit = who in SURVIVED and not self.life.has_begun(run_dir)
        if who == "orchestrator":
            self.life.process.wait()
        logs = logs_of(run_dir)
        quiet = now - logs[-1].stat().st_mtime if logs else 0.0
        records = read_journal(run_dir, on_note=lambda _: None) if logs else iter(())
        ended = frozenset(r.event.rollout.id for r in records if isinstance(r.event, on.RolloutEnded))
        self.kills.append(Kill(who, step, ended, max(0.0, quiet)))
        print(f"kill {len(self.kills)}: {who}, after step {step}, {len(ended)} rollouts ended", flush=True)

    def _acknowledged(self, run_dir: Path) -> int:
        return max(steps_in(run_dir / ACKS), default=0)

    def _when(self, look: Any, what: str) -> Any:
        deadline = time.monotonic() + self.args.patience
        while not (found := look()):
            if (code := self.life.process.poll()) is not None:
                if self._was_starting() and (made := next(self.root.glob("runs/*"), None)):
                    self._go_on(made)
                    continue
                raise Failed(f"it ended with code {code} before {what} was there:\n{self.life.last_words()}")
            if time.monotonic() > deadline:
                raise Failed(
                    f"{what} was not there within {self.args.patience:g} s:\n{self.life.last_words()}"
                )
            time.sleep(_POLL_S)
        return found


def check(
    records: list[Record], kills: list[Kill], band: tuple[float, float] | None
) -> list[tuple[str, Any, bool]]:
    """What was measured over all lives, and whether it is as it must be."""
    folds = RunFolds(live=True)
    folds.read(iter(records))
    told = summary(folds)
    started: Counter[RolloutId] = Counter()
    ended: Counter[RolloutId] = Counter()
    shipped: Counter[RolloutId] = Counter()
    queued: set[RolloutId] = set()
    dropped: set[RolloutId] = set()
    batches: list[int] = []
    alone = out_of_order = 0
    trained = 0
    for record in records:
        event = record.event
        if isinstance(event, on.RunOpened):
            alone += event.resumed_from is not None and not event.recovered
            # The trainer's checkpoint may be ahead of what its last life's orchestrator still heard: that is told first.
            trained = min(event.trained or 0, trained)
        elif isinstance(event, on.StepTrained):
            out_of_order += event.step != trained + 1
            trained = event.step
        elif isinstance(event, on.RolloutEnded):
            ended[event.rollout.id] += 1
        elif isinstance(event, on.GroupProcessed):
            queued.update(v.rollout for v in event.result.verdicts if v.fate == "queued")
        for command in record.commands:
            if isinstance(command, do.StartRollout):
                started[command.rollout] += 1
            elif isinstance(command, do.ShipBatch):
                batches.append(command.batch.step)
                shipped.update(command.batch.rollouts)
            elif isinstance(command, do.NoteDiscarded) or (
                isinstance(command, do.NoteStale) and command.action == "dropped"
            ):
                dropped.add(command.rollout)
    before = frozenset[RolloutId]().union(*[kill.ended for kill in kills])
    waiting = sum(
        line.rollouts.get("left_over", 0) + line.rollouts.get("queued", 0) for line in folds.account.lines()
    )
    unaccounted = len(queued - set(shipped) - dropped) - waiting
    reward = told["heldout_end"]
    twice = len(batches) - len(set(batches))
    rows: list[tuple[str, Any, bool]] = [
        ("status", told["status"], told["status"] == "done"),
        ("rollouts started", len(started), bool(started)),
        (
            "rollouts started twice",
            sum(n > 1 for n in started.values()),
            max(started.values(), default=0) <= 1,
        ),
        ("rollouts that ended before a kill", len(before), True),
        ("of them lost from the journal", len(before - set(ended)), before <= set(ended)),
        ("started and not ended", len(set(started) - set(ended)), set(started) <= set(ended)),
        ("ended twice", sum(n > 1 for n in ended.values()), max(ended.values(), default=0) <= 1),
        ("were to train and are lost", unaccounted, unaccounted == 0),
        (
            "rollouts in two batches",
            sum(n > 1 for n in shipped.values()),
            max(shipped.values(), default=0) <= 1,
        ),
        ("batches cut", len(batches), batches == list(range(1, len(batches) + 1))),
        ("batches cut twice", twice, twice == 0),
        ("steps trained out of order", out_of_order, out_of_order == 0),
        ("lives that went on from a checkpoint alone", alone, alone == 0),
        ("conservation law holds", told["tokens_conserved"], bool(told["tokens_conserved"])),
    ]
    rows.append(
        (
            "held-out reward at the end",
            reward,
            reward is not None and (band is None or band[0] <= reward <= band[1]),
        )
    )
    return rows


def undisturbed(args: argparse.Namespace, root: Path) -> list[float]:
    """Held-out rewards at the end of runs that nobody kills."""
    rewards = []
    for number in range(args.undisturbed):
        place = root / f"undisturbed-{number}"
        place.mkdir()
        life = Life(args.config, place, [*args.words, f"--run.seed={args.seed + number}"], None)
        try:
            if life.process.wait(args.patience) != 0:
                raise Failed(f"an undisturbed run failed:\n{life.last_words()}")
        except subprocess.TimeoutExpired:
            raise Failed(f"an undisturbed run took more than {args.patience:g} s") from None
        finally:
            if life.process.poll() is None:
                life.process.kill()
                life.process.wait()
        rewards.append(float(json.loads(life.out.read_text().splitlines()[-1])["heldout_end"]))
    return rewards


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when")
    parser.add_argument(
        "--within", type=float, default=2.0, help="seconds behind its step in which a kill comes"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds that a step, or the end, may take"
    )
    parser.add_argument(
        "--undisturbed", type=int, default=2, help="runs without kills, for the band of the reward"
    )
    parser.add_argument("--slack", type=float, default=0.05, help="added to that band on both sides")
    parser.add_argument("--config", type=Path, default=Path("examples/reverse-text/run.toml"))
    parser.add_argument("words", nargs="*", help="options of `paceline run`, behind --")
    args = parser.parse_args(argv)
    root = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    chaos: Chaos | None = None
    began = time.monotonic()
    try:
        rewards = undisturbed(args, root)
        band = (min(rewards) - args.slack, max(rewards) + args.slack) if rewards else None
        chaos = Chaos(args, root)
        run_dir = chaos.run()
        records = list(read_journal(run_dir, on_note=lambda _: None))
    except (Failed, PacelineError, subprocess.TimeoutExpired) as error:
        print(f"failed after {len(chaos.kills) if chaos else 0} kills, see {root}: {error}")
        return 1
    finally:
        if chaos is not None:
            chaos.close()
    rows = check(records, chaos.kills, band)
    who = Counter(kill.who for kill in chaos.kills)
    told = ", ".join(f"{count} {name}" for name, count in sorted(who.items()))
    rows.insert(0, ("kills", f"{len(chaos.kills)} ({told})", len(chaos.kills) == args.kills))
    quiet = max([kill.quiet_s for kill in chaos.kills if kill.who == "orchestrator"], default=0.0)
    rows.insert(1, ("lives", chaos.lives, True))
    rows.insert(2, ("longest since the last commit at a kill of the orchestrator, s", f"{quiet:.2f}", True))
    rows.append(
        (
            "band of undisturbed runs",
            "not measured" if band is None else "{:.3f} to {:.3f}".format(*band),
            True,
        )
    )
    for what, value, holds in rows:
        print(f"{'ok  ' if holds else 'FAIL'}  {what:<64} {value}")
    print(f"{time.monotonic() - began:.0f} s")
    if not all(holds for _, _, holds in rows):
        print(f"see {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
