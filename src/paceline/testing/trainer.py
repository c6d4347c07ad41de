"""A trainer that "trains" a batch after some seconds and publishes weights that are only a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.domain.batch import PackedBatch
from paceline.ports import Published, Shipment


class ScriptedTrainer:
    """Both sides of the port at once: batches go in by `ship`, acknowledgements and versions come out by `next`."""

    def __init__(
        self,
        *,
        train_s: Callable[[int], float] = lambda _step: 1.0,
        ship_s: float = 0.0,
        ship_error: Callable[[int], BaseException | None] = lambda _step: None,
        publish_error: Callable[[int], BaseException | None] = lambda _step: None,
        owed: Sequence[int] = (),
    ) -> None:
        """`owed`: steps that were shipped in an earlier life of the run and are trained first."""
        self.batches: list[PackedBatch] = []
        self._train_s = train_s
        self._ship_s = ship_s
        self._ship_error = ship_error
        self._publish_error = publish_error
        self._steps: asyncio.Queue[int] = asyncio.Queue()
        for step in owed:
            self._steps.put_nowait(step)

    async def ship(self, packed: PackedBatch) -> Shipment:
        step = packed.batch.step
        await asyncio.sleep(self._ship_s)
        error = self._ship_error(step)
        if error is not None:
            raise error
        self.batches.append(packed)
        self._steps.put_nowait(step)
        return Shipment(10 * packed.batch.tokens)

    async def next(self) -> Published:
        step = await self._steps.get()
        await asyncio.sleep(self._train_s(step))
        error = self._publish_error(step)
        if error is not None:
            raise error
        return Published(version=step, path=f"weights/v{step}", trained_step=step, metrics={"loss": 0.0})
