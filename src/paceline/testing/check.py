"""What is wrong with an environment, found by running it: against a model that answers well, badly and not at all.

Every finding names what was seen and what to do. Nothing here needs an engine or a GPU; virtual time makes waits free,
and one pass in real time looks for code that holds up the loop.
"""

from __future__ import annotations

import asyncio
import math
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from paceline.config import Limits
from paceline.domain.rollout import Rollout
from paceline.domain.task import Split
from paceline.envs.group_env import GroupEnv, MultiAgentEnv
from paceline.envs.plain import plain_frames
from paceline.envs.protocol import Environment, TaskSource
from paceline.envs.registry import tasks_of
from paceline.errors import ConfigError, said_by
from paceline.runtime.alarm import StillRunning, ends_within
from paceline.runtime.doctor import Finding
from paceline.testing.play import play, play_group

ANSWERS: Final = ("", "yes", "42", "a\n\nb", "é中\U0001f600", "<think>\nno\n</think>\n7", "{", "x" * 400)
"""What the scripted model says, turn by turn: nothing, words, numbers, unicode, thinking, half a JSON, too much."""

_TURNS: Final = 24
"""Model calls after which a conversation that does not end by itself is cut."""

_HELD_S: Final = 0.05
"""Seconds of code between two awaits from which it holds up others: a run has hundreds of rollouts on one loop."""

_OURS: Final = str(Path(__file__).parents[1])
_LIBRARIES: Final = (*{sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


def check_environment(
    make: Callable[[], Environment],
    *,
    tasks: int = 3,
    group_size: int | None = None,
    answers: Sequence[str] = (),
    seconds: float = 120.0,
) -> list[Finding]:
    """All findings, errors first. `make` makes the environment anew; `answers` are said besides our own. Its code may take
    `seconds` of real time in all. A `GroupEnv` is played by groups of `group_size`: four, or two episodes, unless given."""
    try:
        with ends_within(seconds, _place_now):
            return _checked(make, tasks, group_size, answers)
    except StillRunning as error:
        return [
            Finding(
                "error",
                "its code does not come to an end",
                str(error),
                "give its loops an end; for a check that is only slow, --seconds",
            )
        ]


def _checked(
    make: Callable[[], Environment], tasks: int, group_size: int | None, answers: Sequence[str]
) -> list[Finding]:
    env = make()
    cast = _cast_of(env, group_size)
    found = _sources(env, make)
    if any(finding.level == "error" for finding in found):
        return _ranked(found)
    said = (*answers, *ANSWERS)
    source = env.tasks("train")
    before = _plain(source, 0)
    there = tasks if source.size is None else min(tasks, source.size)
    played = [
        r for index in range(there) for start in range(len(said)) for r in cast(env, said, start, index)
    ]
    found += _endings(played)
    if (after := _plain(env.tasks("train"), 0)) != before:
        found.append(
            Finding(
                "error",
                "a rollout changes its task",
                f"{before[:80]} is {after[:80]} afterwards",
                "copy task.data before writing to it: every rollout of the task reads the same object",
            )
        )
    if not any(finding.level == "error" for finding in found):
        found += [
            *_repeats(make, said, cast),
            *_group_starts(make, said),
            *_rewards(played),
            *_truncation(env, played, cast),
            *_branches(played),
            *_holds_up(make(), said, cast),
        ]
    try:
        asyncio.run(env.close())
    except Exception as error:  # anybody's code
        found.append(
            Finding("error", "close() raises", said_by(error), "release what is held, and let it pass twice")
        )
    return _ranked(found)


def _ranked(found: list[Finding]) -> list[Finding]:
    rank = {"error": 0, "warning": 1, "ok": 2}
    return sorted(found, key=lambda finding: rank[finding.level])


class _Cast(Protocol):
    """Plays one rollout, or one group where members only move together: the n-th call is answered with the (start + n)-th answer."""

    def __call__(
        self, env: Environment, said: Sequence[str], start: int, index: int, **more: Any
    ) -> list[Rollout]: ...


def _cast_of(env: Environment, group_size: int | None) -> _Cast:
    if not isinstance(env, GroupEnv):
        return _alone
    roles = len(env.roles) if isinstance(env, MultiAgentEnv) else 0
    return partial(_together, group_size or 2 * roles or 4)


def _alone(env: Environment, said: Sequence[str], start: int, index: int, **more: Any) -> list[Rollout]:
    return [play(env, _script(said, start), index=index, **_limited(more))]


def _together(
    size: int, env: Environment, said: Sequence[str], start: int, index: int, **more: Any
) -> list[Rollout]:
    """Members say different things: each begins one answer later than the one before."""
    scripts = [_script(said, start + member) for member in range(size)]
    return play_group(env, scripts, index=index, **_limited(more))


def _script(said: Sequence[str], start: int) -> list[str]:
    return [said[(start + n) % len(said)] for n in range(_TURNS)]


def _limited(more: Mapping[str, Any]) -> dict[str, Any]:
    return {"limits": Limits(max_turns=_TURNS), **more}


# ── tasks ──


def _sources(env: Environment, make: Callable[[], Environment]) -> list[Finding]:
    found: list[Finding] = []
    prints: dict[Split, str] = {}
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        try:
            source = tasks_of(env, split, type(env).__name__)
            size, prints[split] = source.size, source.fingerprint
            first = _plain(source, 0)
            again = _plain(make().tasks(split), 0)
        except Exception as error:  # anybody's code
            level: Any = "error" if split == "train" else "warning"
            remedy = "return ListTasks([...]) or EndlessTasks(make, fingerprint)"
            told = str(error) if isinstance(error, ConfigError) else said_by(error)
            found.append(Finding(level, f"it has no {split} tasks", told, remedy))
            continue
        found.append(Finding("ok", f"{split} tasks", "endless" if size is None else str(size)))
        if first != again:
            found.append(
                Finding(
                    "error",
                    f"{split} task 0 is another one each time it is made",
                    f"{first[:80]} and then {again[:80]}",
                    "make tasks from their index and a seed alone: a resumed run must find the same ones",
                )
            )
        if make().tasks(split).fingerprint != prints[split]:
            found.append(
                Finding(
                    "error",
                    f"the fingerprint of its {split} tasks changes from one start to the next",
                    "",
                    "make it of what the tasks are made of: a resumed run would begin anew",
                )
            )
    if len(prints) == 2 and prints["train"] == prints["eval"]:
        found.append(
            Finding(
                "warning",
                "train and eval have the same tasks",
                f"both have the fingerprint {prints['train']}",
                "hold some tasks out, or evals measure what was trained on",
            )
        )
    return found


def _plain(source: TaskSource, index: int) -> str:
    return repr(source.get(index))


# ── endings ──


def _endings(played: Sequence[Rollout]) -> list[Finding]:
    found: list[Finding] = []
    kinds: dict[tuple[str, str | None], list[Rollout]] = {}
    for rollout in played:
        kinds.setdefault((rollout.outcome.ending, rollout.outcome.cause), []).append(rollout)
    for (ending, cause), rollouts in kinds.items():
        if ending == "failed":
            said = [m.content for m in rollouts[0].messages if m.role == "assistant"]
            facts = f"{rollouts[0].outcome.detail}; after the answer {said[-1] if said else ''!r}"
            found.append(
                Finding(
                    "error",
                    f"{len(rollouts)} of {len(played)} rollouts failed ({cause})",
                    facts,
                    _remedy(cause, rollouts[0].outcome.detail),
                )
            )
        elif ending == "cancelled":
            found.append(
                Finding(
                    "error",
                    "it raises CancelledError by itself",
                    rollouts[0].outcome.detail,
                    "raise another error: that one is the event loop's own",
                )
            )
        elif cause == "deadline":
            found.append(
                Finding(
                    "error" if len(rollouts) == len(played) else "warning",
                    f"{len(rollouts)} of {len(played)} rollouts wait until their deadline",
                    f"{Limits().deadline_s:g} s in simulated time; after {len(rollouts[0].turns)} model calls",
                    "what it awaits there never comes: give the wait a time limit, and score what there is",
                )
            )
    if not found:
        counts = ", ".join(f"{len(r)} {e}" + (f" ({c})" if c else "") for (e, c), r in kinds.items())
        found.append(Finding("ok", f"{len(played)} rollouts against odd answers", counts))
    return found


_REMEDIES: Final = {
    "environment": "answers of a model may be anything: take them for a wrong answer, and do not raise",
    "unscored": "score every answer, a wrong one with 0; None only where no score can be had",
    "infrastructure": "it is tried again; what is not there when it is checked should be there when it runs",
    "empty": "call the model at least once",
    "engine": "the scripted model does not fail by itself: let EngineError of a model call pass",
}
"""By cause of the failure."""

_SLIPS: Final = (
    (
        "can't be used in 'await' expression",
        "write `async def rollout(...)`, and await only what can be awaited",
    ),
    ("'coroutine' object", "an `await` is missing: `reply = await model.chat(...)`"),
    ("coroutine; expected Result", "an `await` is missing in front of what `rollout` returns"),
    ("expected Result", "end `rollout` with `return Result(reward=...)`"),
    ("the reward is", "a reward is a finite number: look for a division by zero, or a missing value"),
    (
        "Result for each",
        "return a `Result` for every seat: `return [Result(reward=...) for seat in seats]`; for every role, by its name",
    ),
    ("results for", "return one `Result` for every seat, in their order"),
    ("is a plain function", "write `async def`"),
    ("must be numbers", "give rewards and metrics as numbers: Result(reward=1.0, metrics={'name': 2.0})"),
)
"""What an error's text says of the slip behind it, the more telling first."""


def _remedy(cause: str | None, detail: str) -> str:
    return next((remedy for mark, remedy in _SLIPS if mark in detail), _REMEDIES.get(cause or "", ""))


def _rewards(played: Sequence[Rollout]) -> list[Finding]:
    rewards = [r.reward for r in played if r.reward is not None and r.trains]
    if not rewards:
        return [Finding("error", "no rollout has a reward", "", "return Result(reward=...)")]
    low, high = min(rewards), max(rewards)
    if math.isclose(low, high):
        return [
            Finding(
                "warning",
                "every answer has the same reward",
                f"{low:g} for all {len(rewards)} rollouts of the scripted model",
                "if no answer of your model differs either, nothing can be learnt; give partial credit, or check "
                "with --answer what a right one is worth",
            )
        ]
    return [Finding("ok", "rewards", f"from {low:g} to {high:g}")]


# ── repeatability ──


def _same(a: Rollout, b: Rollout) -> str:
    """What two rollouts that should be the same differ in; empty if nothing."""
    for n, (x, y) in enumerate(zip(a.messages, b.messages, strict=False)):
        if x != y:
            return f"message {n} is {x.content[:60]!r} and then {y.content[:60]!r}"
    if len(a.messages) != len(b.messages):
        return f"{len(a.messages)} messages and then {len(b.messages)}"
    return "" if a.reward == b.reward else f"the reward is {a.reward} and then {b.reward}"


def _repeats(make: Callable[[], Environment], said: Sequence[str], cast: _Cast) -> list[Finding]:
    first, again = (cast(make(), said, 1, 0, seed=5) for _ in range(2))
    if difference := next(filter(None, map(_same, first, again)), ""):
        return [
            Finding(
                "warning",
                "the same rollout comes out differently when it is repeated",
                difference,
                "draw from ctx.rng and ctx.group_rng, never from `random` or the clock: a retry, and a resumed run, "
                "must find the same world",
            )
        ]
    return [Finding("ok", "a rollout repeats")]


def _group_starts(make: Callable[[], Environment], said: Sequence[str]) -> list[Finding]:
    if isinstance(make(), GroupEnv):  # whose members may play different parts
        return []
    first, second = (_alone(make(), said, 1, 0, member=m, seed=5)[0] for m in (0, 1))
    opening = [
        [
            m.content
            for m in r.messages[: next((n for n, m in enumerate(r.messages) if m.role == "assistant"), 0)]
        ]
        for r in (first, second)
    ]
    if opening[0] != opening[1]:
        return [
            Finding(
                "warning",
                "members of a group are asked different things",
                f"{opening[0]} and {opening[1]}",
                "draw what a task leaves open from ctx.group_rng, which all members share: rewards are compared",
            )
        ]
    return []


# ── limits ──


def _truncation(env: Environment, played: Sequence[Rollout], cast: _Cast) -> list[Finding]:
    if all(len(r.turns) < 2 for r in played):
        return []
    cut = cast(env, ANSWERS, 1, 0, limits=Limits(max_turns=1))
    unscored = [r for r in cut if r.outcome.ending == "truncated" and r.reward is None and r.trains]
    if unscored:
        return [
            Finding(
                "warning",
                "a rollout that a limit cuts short has no reward",
                unscored[0].outcome.detail,
                "write on_truncated(task, model, ctx, limit), and keep what it needs in ctx.state: unscored ones "
                "neither vote nor train, so the model never learns to be brief",
            )
        ]
    return []


def _branches(played: Sequence[Rollout]) -> list[Finding]:
    breaks = [r for r in played if any(not turn.extends for turn in r.turns[1:])]
    if not breaks:
        return []
    return [
        Finding(
            "warning",
            "prompts do not extend the conversation so far",
            f"{len(breaks)} of {len(played)} rollouts",
            "each break begins a new sample and a prefill from the start: say what is new with model.chat, where the "
            "history need not be rewritten",
        )
    ]


# ── holding up the loop ──


def _holds_up(env: Environment, said: Sequence[str], cast: _Cast) -> list[Finding]:
    """The longest stretch without an await, in real time, and whose code it was."""
    watch = _Watch(threading.get_ident())
    with watch:
        cast(env, said, 1, 0)
    found = []
    if watch.loop.longest >= _HELD_S:
        found.append(
            Finding(
                "warning",
                "its code holds up the loop",
                f"{watch.loop.told()} without an await",
                "all rollouts share one loop: use `await ctx.in_thread(...)`, make it a plain function, or give it workers",
            )
        )
    if watch.own.longest >= _HELD_S:
        found.append(
            Finding(
                "warning",
                "its plain functions take their time, and their turns",
                f"{watch.own.told()} in one call",
                "only one runs at a time: set `blocking = True` if they may run side by side, or give it workers",
            )
        )
    return found


def _own_place(frame: FrameType | None) -> str:
    """`file:line` of the user's code that runs now; empty while it is ours that runs, or waits."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return ""
        if not path.startswith(_LIBRARIES):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _place_now(frame: FrameType | None) -> str:
    """The same of a frame of the loop, or of a plain function that the loop waits for."""
    return _own_place(frame) or _place_of_plain(sys._current_frames())


def _place_of_plain(frames: Mapping[int, FrameType]) -> str:
    return next(filter(None, map(_own_place, plain_frames(frames))), "")


class _Stay:
    """How long a thread has stayed at one line of the user's code."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._where = self._place = ""
        self._since = 0.0

    def seen(self, place: str, now: float) -> None:
        if place != self._place or not place:
            self._since, self._place = now, place
        elif now - self._since > self.longest:
            self.longest, self._where = now - self._since, place

    def told(self) -> str:
        return f"{1000 * self.longest:.0f} ms at {self._where}"


class _Watch:
    """Looks at the loop's thread, and at that of plain functions, from another one."""

    def __init__(self, thread: int) -> None:
        self.loop = _Stay()
        self.own = _Stay()
        self._thread = thread
        self._stop = threading.Event()
        self._looker = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._looker.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._looker.join()

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            now, frames = time.perf_counter(), sys._current_frames()
            self.loop.seen(_own_place(frames.get(self._thread)), now)
            self.own.seen(_place_of_plain(frames), now)
