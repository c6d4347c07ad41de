"""The floor under `dispatch_sink`: the same load through a loop that decides and checks nothing.

One task a rollout, which sleeps, takes its prebuilt arrays and starts the next; eight make a group, whose samples are
concatenated and given an advantage; 512 make a batch, which is packed into arrays. No versions, no admission, no
staleness, no records, no failures. What Paceline costs beyond it is the price of those; and since both run on the same
machine within the same minute, their ratio says more than either figure does of a machine that somebody else has.
"""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np
from numpy.typing import NDArray

Shape = tuple[tuple[int, int], ...]
GROUP, BATCH, RANKS = 8, 512, 8


class BareLoop:
    """`count` rollouts after a ramp, `in_flight` at once, at `rate` a second (None: as fast as it goes)."""

    def __init__(self, shape: Shape, in_flight: int, rate: float | None, count: int) -> None:
        rng = np.random.default_rng(0)
        self.parts: list[NDArray[np.int32]] = []
        self.masks: list[NDArray[np.bool_]] = []
        self.logprobs: list[NDArray[np.float32]] = []
        for prompt, sampled in shape:
            self.parts += [rng.integers(1, 30_000, n, dtype=np.int32) for n in (prompt, sampled)]
            self.masks += [np.zeros(prompt, np.bool_), np.ones(sampled, np.bool_)]
            self.logprobs += [np.zeros(prompt, np.float32), np.full(sampled, -0.7, np.float32)]
        self.in_flight = in_flight
        self.mean_s = in_flight / rate if rate else 0.0
        self.ramp, self.count = (2 * in_flight if rate else in_flight), count
        self.random = random.Random(0)
        self.groups: dict[int, list[float]] = {}
        self.batch: list[tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], float]] = []
        self.ended = self.begun = 0
        self.cpu = 0.0
        self.done = asyncio.Event()

    async def run(self) -> float:
        """CPU microseconds a rollout."""
        self.tasks = {self._start() for _ in range(self.in_flight)}
        await self.done.wait()
        for task in self.tasks:
            task.cancel()
        return self.cpu / self.count * 1e6

    def _start(self) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._roll_out(self.begun // GROUP))
        self.begun += 1
        return task

    async def _roll_out(self, group: int) -> None:
        await asyncio.sleep(self.random.expovariate(1.0 / self.mean_s) if self.mean_s else 0)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.discard(task)
        self.tasks.add(self._start())
        rewards = self.groups.setdefault(group, [])
        rewards.append(self.random.random())
        if len(rewards) == GROUP:
            self._close(self.groups.pop(group))
        self.ended += 1
        if self.ended == self.ramp:
            self.cpu = time.process_time()
        elif self.ended == self.ramp + self.count:
            self.cpu = time.process_time() - self.cpu
            self.done.set()

    def _close(self, rewards: list[float]) -> None:
        mean = sum(rewards) / GROUP
        for reward in rewards:
            self.batch.append(
                (
                    np.concatenate(self.parts),
                    np.concatenate(self.masks),
                    np.concatenate(self.logprobs),
                    reward - mean,
                )
            )
        if len(self.batch) == BATCH:
            for rank in range(RANKS):
                mine = self.batch[rank::RANKS]
                for array in range(3):
                    np.concatenate([sample[array] for sample in mine])
            self.batch = []
