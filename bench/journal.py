"""What the journal costs a rollout, everything included: records, arrays, compression, writing, flushing.

Payload (a) is one turn of 256 prompt and 512 sampled tokens, (b) ten turns that come to about 8,190. Ids are drawn from
a Zipf distribution, as text has it; logprobs are mostly near 0 with a long tail; messages are words. CPU is that of the
process, the writing thread included; `append` is what the event loop pays.

`journal_ms_per_rollout` is (b) as a run has it: groups of 8, each made durable before it is done with, 16 of them under way
at a time. CPU again; rollouts a second are wall time, and so the disk's.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.domain import commands as c
from paceline.domain import events as e
from paceline.domain.group import ClosedGroup, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Message, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef
from paceline.journal import FileJournal, read_journal, read_rollouts

GROUP = 8
PAYLOADS = {"a": (((256, 512),), 1_500, 4096), "b": (((230, 589),) * 10, 14_000, 1024)}
"""Turns, characters of messages, rollouts measured."""
TARGET_US = {"a": 100.0, "b": 350.0}
VARIANTS = 512
"""Enough that no block holds one twice: compression would find it."""

UNDER_WAY = 16
"""Groups that wait for the disk at a time: one commit serves those that came while the one before was written."""

ROWS = (
    "journal_ms_per_rollout",
    "journal_loop_us_per_rollout",
    "journal_rollouts_per_s",
    "journal_b_per_token",
    *(
        f"journal_{what}_{p}"
        for p in PAYLOADS
        for what in (
            "us_per_rollout",
            "append_us",
            "bytes_per_token",
            "read_us_per_rollout",
            "read_rollouts_us_per_rollout",
        )
    ),
)


class Text:
    """Ids, logprobs and words that compress as real ones do."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(0)
        self._vocabulary = self._noise.permutation(151_000).astype(np.int32)
        self._words = [f"w{number}" for number in range(3000)]

    def ids(self, count: int) -> NDArray[np.int32]:
        return self._vocabulary[np.minimum(self._noise.zipf(1.2, count), 150_999)]

    def logprobs(self, count: int) -> NDArray[np.float32]:
        spread = np.exp(self._noise.normal(-1.5, 2.0, count))
        return -(self._noise.exponential(1.0, count) * spread).astype(np.float32)

    def words(self, characters: int) -> str:
        drawn = np.minimum(self._noise.zipf(1.2, characters // 5), 2999)
        return " ".join(self._words[number] for number in drawn.tolist())


def make_rollouts(payload: str) -> list[Rollout]:
    sizes, characters, count = PAYLOADS[payload]
    text = Text()
    made = []
    for _ in range(VARIANTS):
        turns = tuple(
            Turn(
                text.ids(p),
                text.ids(s),
                text.logprobs(s),
                ((3, s),),
                k > 0,
                "stop",
                "engine-0",
                p,
                0.1,
                k,
                k + 1,
            )
            for k, (p, s) in enumerate(sizes)
        )
        each = characters // (2 * len(sizes))
        messages = tuple(Message(role, text.words(each)) for _ in sizes for role in ("user", "assistant"))
        made.append((turns, messages))
    return [
        Rollout(
            id=RolloutId(number // GROUP, number % GROUP),
            task=TaskRef("bench", "train", number // GROUP),
            outcome=COMPLETED,
            turns=made[number % VARIANTS][0],
            reward=float(number % 2),
            rewards={"right": 1.0},
            metrics={"steps": 3.0},
            messages=made[number % VARIANTS][1],
        )
        for number in range(count)
    ]


def records(rollouts: list[Rollout]) -> Iterator[tuple[e.Event, tuple[c.Command, ...]]]:
    """What the core hears and says about these rollouts."""
    for first in range(0, len(rollouts), GROUP):
        group = rollouts[first : first + GROUP]
        number = first // GROUP
        for one in group:
            yield e.TimerFired(), (c.StartRollout(one.id, one.task, 1, 2, "engine-0", 3, "a place was free"),)
        for one in group:
            for turn in one.turns:
                yield e.TurnRequested(one.id, 256, 512), (c.GrantTurn(one.id, "engine-0", 3),)
                yield e.SegmentEnded(one.id, "engine-0", turn.versions, "stop", 10, 0.5), ()
            closed = ClosedGroup(number, one.task, GROUP, tuple(group))
            yield e.RolloutEnded(one), ((c.ProcessGroup(closed, "closed"),) if one is group[-1] else ())
        verdicts = tuple(Verdict(one.id, "queued", "", (_sample(one),), 0.5) for one in group)
        yield e.GroupProcessed(GroupResult(number, verdicts, 0.5, 0.25), 0.01), ()


def _sample(one: Rollout) -> Sample:
    tokens = one.prompt_tokens + one.sampled_tokens
    return Sample(
        token_ids=np.zeros(tokens, np.int32),
        trainable=np.zeros(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32),
        versions=((3, one.sampled_tokens),),
        rollout=one.id,
        env="bench",
        task_index=0,
        ending="completed",
        reward=1.0,
        temperature=1.0,
        advantage=0.5,
    )


async def measure(payload: str) -> dict[str, float]:
    rollouts = make_rollouts(payload)
    appended = list(records(rollouts))
    count = len(rollouts)
    tokens = sum(one.prompt_tokens + one.sampled_tokens for one in rollouts)
    with tempfile.TemporaryDirectory() as name:
        kept = FileJournal(Path(name), "bench")
        start, append_s = time.process_time(), 0.0
        for at in range(0, len(appended), 1024):
            began = time.thread_time()
            for event, commands in appended[at : at + 1024]:
                kept.append(1.0, event, commands)
            append_s += time.thread_time() - began
            await kept.flush()
        cpu_s = time.process_time() - start
        nbytes = kept.nbytes
        await kept.close()
        start = time.process_time()
        read = sum(1 for _ in read_journal(name))
        read_s = time.process_time() - start
        start = time.process_time()
        whole = sum(1 for _ in read_rollouts(name))
        whole_s = time.process_time() - start
    if (read, whole) != (len(appended), count):
        raise RuntimeError(f"{read} of {len(appended)} records and {whole} of {count} rollouts came back")
    return {
        "us_per_rollout": cpu_s / count * 1e6,
        "append_us": append_s / count * 1e6,
        "bytes_per_token": nbytes / tokens,
        "read_us_per_rollout": read_s / count * 1e6,
        "read_rollouts_us_per_rollout": whole_s / count * 1e6,
    }


async def by_group() -> dict[str, float]:
    """Payload b, a flush for each group."""
    rollouts = make_rollouts("b")
    groups = [list(records(rollouts[at : at + GROUP])) for at in range(0, len(rollouts), GROUP)]
    tokens = sum(one.prompt_tokens + one.sampled_tokens for one in rollouts)
    append_s = 0.0
    with tempfile.TemporaryDirectory() as name:
        kept = FileJournal(Path(name), "bench")
        places = asyncio.Semaphore(UNDER_WAY)

        async def one(group: list[tuple[e.Event, tuple[c.Command, ...]]]) -> None:
            nonlocal append_s
            async with places:
                began = time.thread_time()
                for event, commands in group:
                    kept.append(1.0, event, commands)
                append_s += time.thread_time() - began
                await kept.flush()

        start, began_wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*map(one, groups))
        cpu_s, wall_s = time.process_time() - start, time.perf_counter() - began_wall
        await kept.close()
    return {
        "journal_ms_per_rollout": cpu_s / len(rollouts) * 1e3,
        "journal_loop_us_per_rollout": append_s / len(rollouts) * 1e6,
        "journal_rollouts_per_s": len(rollouts) / wall_s,
        "journal_b_per_token": kept.nbytes / tokens,
    }


GROUP_ROWS = {
    "journal_ms_per_rollout": ("ms", 0.35, "CPU in all, a flush for each group of 8"),
    "journal_loop_us_per_rollout": ("us", 15.0, "of it on the event loop"),
    "journal_rollouts_per_s": ("1/s", 1500.0, "wall, the disk's time included"),
    "journal_b_per_token": ("B", 6.0, "on disk: store and log, messages included"),
}


def group_rows() -> Iterator[dict[str, Any]]:
    tries = [asyncio.run(by_group()) for _ in range(3)]
    for name, (unit, target, note) in GROUP_ROWS.items():
        is_rate = unit == "1/s"
        value = (max if is_rate else min)(each[name] for each in tries)
        ok = value >= target if is_rate else value <= target
        yield {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "note": note}


def rows() -> list[dict[str, Any]]:
    out = list(group_rows())
    for payload in PAYLOADS:
        best = asyncio.run(measure(payload))
        again = asyncio.run(measure(payload))
        targets = {"us_per_rollout": TARGET_US[payload], "append_us": 15.0, "bytes_per_token": 6.0}
        notes = {
            "us_per_rollout": "CPU in all, writing thread included",
            "append_us": "of it on the event loop",
            "bytes_per_token": "on disk: store and log, messages included",
            "read_us_per_rollout": "CPU, reading its records",
            "read_rollouts_us_per_rollout": "CPU, reading it with tokens",
        }
        for what, note in notes.items():
            value, target = min(best[what], again[what]), targets.get(what)
            out.append(
                {
                    "name": f"journal_{what}_{payload}",
                    "value": value,
                    "unit": "B" if what == "bytes_per_token" else "us",
                    "target": target,
                    "ok": None if target is None else value <= target,
                    "note": note,
                }
            )
    return out
