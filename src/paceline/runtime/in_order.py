"""Groups are processed as they close, and told of in the order in which they were opened. See `docs/repeating.md`.

    ProcessGroup 7 ─▶ processed ─▶ waits for 5 and 6 ─▶ GroupProcessed 7
    ProcessGroup 5 ─▶ processed ─────────────────────▶ GroupProcessed 5
    group 6 is open: its members still run

The core knows which groups there are. So nothing has to be remembered over a kill: groups that waited are processed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.scheduler import Core
from paceline.domain.commands import Command
from paceline.domain.events import Event, GroupProcessed
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import GroupId
from paceline.runtime.processor import Fail, Processor, Tell

_BY_THE_CLOCK = "deadline"


class InOrder:
    """A `Processor` around another. As a fold, it hears when a group was told of."""

    def __init__(self, processor: Processor, core: Core, on_note: Callable[[str], None]) -> None:
        self._processor = processor
        self._core = core
        self._on_note = on_note
        self._waiting: dict[GroupId, asyncio.Future[None]] = {}

    def process_soon(self, group: ClosedGroup, tell: Tell, fail: Fail) -> bool:
        return False  # it may have to wait for others

    async def process(self, group: ClosedGroup) -> GroupProcessed:
        for rollout in group.rollouts:
            if rollout.outcome.cause == _BY_THE_CLOCK:
                self._on_note(
                    f"{rollout.id} was cut off by its deadline, which another run may not do: raise limits.deadline_s, for "
                    "run.deterministic to hold"
                )
        # They come in the order in which they ended, and what is summed over them depends on it.
        members = tuple(sorted(group.rollouts, key=lambda rollout: rollout.id))
        answer = await self._processor.process(msgspec.structs.replace(group, rollouts=members))
        if group.id != self._next():
            turn = self._waiting[group.id] = asyncio.get_running_loop().create_future()
            await turn
        return answer

    def apply(self, _at: float, event: Event, _commands: Sequence[Command]) -> None:
        if not isinstance(event, GroupProcessed):
            return
        turn = self._waiting.pop(self._next(), None)
        if turn is not None and not turn.done():  # one that waits is cancelled when the run ends
            turn.set_result(None)

    def _next(self) -> GroupId:
        """The oldest train group that was not told of; -1 where there is none."""
        open_ = [group.id for group in self._core.groups.groups() if group.task.split == "train"]
        return min([*open_, *self._core.processing], default=-1)
