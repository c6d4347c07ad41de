"""`paceline eval CONFIG --chat NAME`: the evals of a config, played by a chat endpoint in the policy's place.

So that another model, a teacher or one that costs money, is measured in the very environments, on the very tasks and within
the very limits that the policy is measured with. No engine, no trainer and no run directory are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn

import msgspec

from paceline.cli.open_files import allow_open_files
from paceline.cli.options import add_config_argument, load_config, positive
from paceline.core.evaluation import EvalEpoch
from paceline.core.streams import key, mix
from paceline.domain.commands import StartRollout
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.task import Split, TaskRef
from paceline.errors import ConfigError, InvariantError, PacelineError, place_of, printable

if TYPE_CHECKING:
    from paceline.config import EvalSection, RunConfig
    from paceline.runtime.runner import RolloutRunner

TAKES_CONFIG = True

_MOST_CAUSES = 3

CUT_OFF_S = 10.0
"""Seconds from a Ctrl-C, or a SIGTERM, until code that holds the event loop is cut off."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    parser.add_argument("--chat", required=True, metavar="NAME", help="which [chat.NAME] of the config plays")
    parser.add_argument("--at-once", type=positive, default=64, metavar="N", help="rollouts under way (64)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write each rollout there, one JSON object a line"
    )
    parser.add_argument("--json", action="store_true", help="print what was measured, one JSON line an eval")


def run(args: argparse.Namespace) -> int:
    """0 when every eval was measured, 1 when one had no rollout with a score. KeyboardInterrupt after a Ctrl-C or
    SIGTERM, when what had been measured by then is printed."""
    config = load_config(args).value
    allow_open_files()
    if args.chat not in config.chat:
        there = ", ".join(sorted(config.chat)) or "none"
        raise ConfigError(
            f"--chat {args.chat}: the config has no [chat.{args.chat}] (it has {there}): add it, with url and model"
        )
    if not config.eval:
        raise ConfigError("the config has no [[eval]], so there is nothing to measure: add one")
    return 0 if asyncio.run(_play(config, args)) else 1


async def _play(config: RunConfig, args: argparse.Namespace) -> bool:
    """Whether each eval had a rollout with a score."""
    from paceline.cli.environments import Environments
    from paceline.cli.services import ConfiguredServices, chat_of
    from paceline.runtime.chat_calls import ChatCalls, reads_calls
    from paceline.runtime.runner import RolloutRunner

    name, scored = args.chat, []
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(tempfile.mkdtemp(prefix="paceline-eval-"))
        stack.callback(_keep_what_was_said, logs)
        stack.enter_context(_cut_off_after_ctrl_c())
        chat = chat_of(name, config.chat[name])
        stack.push_async_callback(chat.close)
        services = ConfiguredServices(config.services, config.chat)
        stack.push_async_callback(services.close)
        environments = Environments()
        stack.push_async_callback(environments.close)
        without_training = config.model_copy(update={"env": ()})
        await environments.start(without_training, None, logs=logs, ask=services.call)
        out = _Out(args.out) if args.out else None
        if out is not None:
            stack.callback(out.close)
        runner = RolloutRunner(
            environments.runtimes,
            {},
            _NoGate(),
            time.monotonic,
            calls_of=lambda _, shared: ChatCalls(chat, shared),
        )
        for section in config.eval:
            where: tuple[Split, str] = ("eval", section.label)
            reads_calls(environments.runtimes[where].environment)
            eval_ = _Eval(section, environments.sizes[where], config.run.seed, runner, out)
            print(f"{section.label}: {eval_.epoch.owed} rollouts", file=sys.stderr)
            try:
                await eval_.play(args.at_once)
            except* PacelineError as failed:
                raise failed.exceptions[0] from failed
            finally:  # of one that was cut short too: what has been answered was waited for, and may be paid for
                print(eval_.as_json(config, name) if args.json else eval_.told(), flush=True)
            scored.append(eval_.epoch.report().scored)
    return all(scored)


def _keep_what_was_said(logs: Path) -> None:
    """Of workers, if any said something: an error may name the file."""
    if not any(file.stat().st_size for file in logs.glob("*")):
        shutil.rmtree(logs)


@contextlib.contextmanager
def _cut_off_after_ctrl_c() -> Iterator[None]:
    """A Ctrl-C stops what is played, and SIGTERM is one; where an environment's code holds the loop, it is cut off some
    seconds later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from paceline.cli.stopping import SAME_SIGNAL_S

    asks, heard_at = signal.getsignal(signal.SIGINT), -SAME_SIGNAL_S
    asked = (
        asks if callable(asks) else signal.default_int_handler
    )  # a shell has its background jobs ignore Ctrl-C

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        before, heard_at = heard_at, time.monotonic()
        if heard_at - before >= SAME_SIGNAL_S:
            signal.setitimer(signal.ITIMER_REAL, CUT_OFF_S)
            asked(signal.SIGINT, frame)

    def cut_off(number: int, frame: FrameType | None) -> None:
        print(
            f"cut off at {place_of(frame) or 'an unknown place'}: code there holds the event loop",
            file=sys.stderr,
        )
        raise KeyboardInterrupt

    hears = {signal.SIGALRM: cut_off, signal.SIGTERM: heard}
    if callable(asks):
        hears[signal.SIGINT] = heard
    before = {number: signal.signal(number, handler) for number, handler in hears.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Eval:
    """One eval, and what it has measured."""

    def __init__(
        self,
        section: EvalSection,
        size: int | None,
        seed: int,
        runner: RolloutRunner,
        out: _Out | None,
    ) -> None:
        examples = min(section.examples, size or section.examples)
        self.epoch = EvalEpoch(section.label, 0, examples=examples, k=section.k)
        self._seed = key(seed, "eval", section.label)
        self._runner = runner
        self._out = out
        self._failures: Counter[str] = Counter()
        self._took_s = 0.0

    async def play(self, at_once: int) -> None:
        """All of it, with about `at_once` rollouts under way; the members of a group always together."""
        began = time.monotonic()
        places = asyncio.Semaphore(max(1, at_once // self.epoch.k))
        try:
            async with asyncio.TaskGroup() as groups:
                while self.epoch.undrawn:
                    await places.acquire()
                    groups.create_task(self._group(self.epoch.draw(), places))
        finally:
            self._took_s = time.monotonic() - began

    async def _group(self, example: int, places: asyncio.Semaphore) -> None:
        task = TaskRef(self.epoch.env, "eval", example)
        seed = mix(self._seed, example)
        runs = [
            asyncio.ensure_future(
                self._runner.run(
                    StartRollout(RolloutId(example, member), task, seed, mix(seed, member), "", 0)
                )
            )
            for member in range(self.epoch.k)
        ]
        try:
            await asyncio.gather(*runs)
        except asyncio.CancelledError:  # the members that have ended count; the others were cancelled
            ended = [r for r in runs if r.done() and not r.cancelled() and r.exception() is None]
            if ended:
                self._settle(task, [run.result() for run in ended])
            raise
        finally:
            places.release()
        self._settle(task, [run.result() for run in runs])

    def _settle(self, task: TaskRef, rollouts: list[Rollout]) -> None:
        self.epoch.settle(ClosedGroup(task.index, task, self.epoch.k, tuple(rollouts)))
        for rollout in rollouts:
            if rollout.reward is None:
                outcome = rollout.outcome
                self._failures[
                    f"{outcome.cause}: {outcome.detail}" if outcome.detail else str(outcome.cause)
                ] += 1
            if self._out is not None:
                self._out.write(_line(rollout))

    def told(self) -> str:
        """For people."""
        report = self.epoch.so_far()
        reward = "no reward" if report.mean_reward is None else f"reward {report.mean_reward:.3f}"
        settled, examples = self.epoch.settled, self.epoch.examples
        part = "" if self.epoch.complete else f" (partial, {settled} of {examples} examples)"
        parts = [
            f"{report.env}{part}: {reward}",
            *(f"pass@{j} {share:.3f}" for j, share in report.pass_at.items()),
            f"{report.scored} of {report.rollouts} rollouts scored",
            ", ".join(f"{count} {ending}" for ending, count in report.by_ending.items()),
            f"{report.mean_tokens:.0f} tokens a rollout",
            f"{self._took_s:.1f} s",
        ]
        causes = [
            f"  {count} without a score, {printable(cause)}"
            for cause, count in self._failures.most_common(_MOST_CAUSES)
        ]
        return "\n".join(["  ".join(parts), *causes])

    def as_json(self, config: RunConfig, name: str) -> str:
        report = msgspec.to_builtins(self.epoch.so_far(), str_keys=True)
        kept = ("env", "rollouts", "scored", "mean_reward", "pass_at", "by_ending", "mean_tokens")
        told = {"chat": name, "model": config.chat[name].model, **{field: report[field] for field in kept}}
        return json.dumps(
            {
                **told,
                "examples": self.epoch.examples,
                "settled": self.epoch.settled,
                "seconds": round(self._took_s, 3),
                "failures": dict(self._failures),
            }
        )


class _Out:
    """The file of `--out`. ConfigError when it cannot be opened or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK) or path.is_dir():
            raise ConfigError(f"--out {path}: no file can be written there")

    def write(self, line: str) -> None:
        try:
            if (
                self._file is None
            ):  # not before: what an earlier command has measured is worth more than nothing
                self._file = self._path.open("w", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"--out {self._path}: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # it was told when its last line was written
                self._file.close()


class _NoGate:
    """An endpoint holds whom it must by itself; nothing asks here."""

    def request(self, event: object) -> NoReturn:
        raise InvariantError(f"no engine plays here, and {event} asks for one")

    def report(self, event: object) -> NoReturn:
        raise InvariantError(f"no engine plays here, and {event} comes from one")


def _line(rollout: Rollout) -> str:
    """One rollout as a line of JSON."""
    said = {
        "env": rollout.task.env,
        "example": rollout.task.index,
        "member": rollout.id.member,
        "ending": rollout.outcome.ending,
        "cause": rollout.outcome.cause,
        "detail": rollout.outcome.detail,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "metrics": rollout.metrics,
        "info": rollout.info,
        "turns": len(rollout.turns),
        "prompt_tokens": rollout.prompt_tokens,
        "sampled_tokens": rollout.sampled_tokens,
        "seconds": round(rollout.ended - rollout.started, 3),
        "model_s": round(rollout.model_s, 3),
        "messages": rollout.messages,
    }
    try:
        return msgspec.json.encode(said, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a character, of a model or a library
        return json.dumps(msgspec.to_builtins(said, enc_hook=str))
