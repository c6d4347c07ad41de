"""Which environment next, and which of its tasks.

Environments are drawn by weight and tasks by sampler, both from counter-based streams: the n-th draw of a run is the
same whatever happened before, so a resumed run draws what an uninterrupted one would have drawn, and no generator
state has to be saved: the counters are the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.streams import key, permutation, uniform
from paceline.domain.ids import EnvName
from paceline.domain.task import TaskRef


class Source(msgspec.Struct, frozen=True):
    """What the curriculum knows of an environment's tasks."""

    env: EnvName
    size: int | None
    """Tasks of one epoch; None for an endless source, whose task n is simply index n."""
    weight: float = 1.0
    sampler: Literal["shuffled", "sequential"] = "shuffled"
    epochs: int | None = None
    """Walks through before it is exhausted; None for ever."""
    fingerprint: str = ""
    """Changes when the tasks do; a saved position is only good for the tasks it was made on."""


class Sampler:
    """The task order of one environment. One draw is O(1), and O(size) once an epoch."""

    __slots__ = ("_epoch", "_order", "_seed", "drawn", "redraw", "source")

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        self.drawn = 0
        """Draws so far, redraws not counted."""
        self.redraw: deque[TaskRef] = deque()
        """Tasks that were drawn in an earlier life of the run and not finished: they come first."""
        self._seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] | None = None

    @property
    def exhausted(self) -> bool:
        source = self.source
        if self.redraw or source.size is None or source.epochs is None:
            return False
        return self.drawn >= source.size * source.epochs

    def draw(self) -> TaskRef:
        """The next task. Call only while not `exhausted`."""
        if self.redraw:
            return self.redraw.popleft()
        source, n = self.source, self.drawn
        self.drawn += 1
        if source.size is None:
            return TaskRef(source.env, "train", n)
        epoch, position = divmod(n, source.size)
        if source.sampler == "sequential":
            return TaskRef(source.env, "train", position, epoch)
        if epoch != self._epoch or self._order is None:
            self._order = permutation(self._seed, source.size, "order", source.env, epoch)
            self._epoch = epoch
        return TaskRef(source.env, "train", int(self._order[position]), epoch)


class Curriculum:
    """Draws groups over all training environments."""

    __slots__ = ("_draws", "_key", "samplers")

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self.samplers = {source.env: Sampler(source, seed) for source in sources}
        self._key = key(seed, "mix")
        self._draws = 0

    @property
    def exhausted(self) -> bool:
        return all(sampler.exhausted for sampler in self.samplers.values())

    def draw(self, may: Callable[[EnvName], bool]) -> TaskRef | None:
        """The next task of an environment that `may` start a group now; None when there is none.

        An environment that may not (its start rate is used up) passes its turn to the others instead of
        holding them up; over a whole run the mix then leans to the others by as much as the limit demands.
        """
        open_to = [s for s in self.samplers.values() if not s.exhausted and may(s.source.env)]
        if not open_to:
            return None
        for sampler in open_to:
            if sampler.redraw:
                # Not a draw of the mix: an uninterrupted run would not have made it.
                return sampler.draw()
        number = self._draws
        self._draws += 1  # also where there is no choice: then the draws of the environments add up to it
        if len(open_to) == 1:
            return open_to[0].draw()
        at = uniform(self._key, number) * sum(s.source.weight for s in open_to)
        for sampler in open_to:
            at -= sampler.source.weight
            if at < 0:
                return sampler.draw()
        return open_to[-1].draw()

    def snapshot(self, unfinished: Sequence[TaskRef] = ()) -> dict[str, Any]:
        """State to resume from; `unfinished` are drawn tasks that brought nothing and are drawn again."""
        pending: dict[EnvName, list[tuple[int, int]]] = {env: [] for env in self.samplers}
        for sampler in self.samplers.values():
            pending[sampler.source.env] += [(t.index, t.epoch) for t in sampler.redraw]
        for task in unfinished:
            pending[task.env].append((task.index, task.epoch))
        return {
            "draws": self._draws,
            "envs": {
                env: {"drawn": s.drawn, "fingerprint": s.source.fingerprint, "redraw": pending[env]}
                for env, s in self.samplers.items()
            },
        }

    def restore(self, state: dict[str, Any], unfinished: Sequence[TaskRef] = ()) -> list[str]:
        """Take a snapshot's positions back; returns a warning for each that does not fit any more. `unfinished` are
        drawn again as well.

        A source whose tasks changed, or that is new, starts at its beginning: its old position says nothing. A
        fingerprint of None, where nobody noted it, is taken for the same.
        """
        self._draws = state["draws"]
        warnings = []
        for env, saved in state["envs"].items():
            sampler = self.samplers.get(env)
            then = saved["fingerprint"]
            if sampler is None:
                warnings.append(f"env {env!r} is gone: its position ({saved['drawn']} draws) is dropped")
            elif then is not None and sampler.source.fingerprint != then:
                warnings.append(
                    f"env {env!r} has other tasks than at the checkpoint ({then or 'none'} then, "
                    f"{sampler.source.fingerprint or 'none'} now): it starts at its beginning"
                )
            else:
                sampler.drawn = saved["drawn"]
                sampler.redraw.extend(TaskRef(env, "train", i, e) for i, e in saved["redraw"])
                sampler.redraw.extend(task for task in unfinished if task.env == env)
        return warnings
