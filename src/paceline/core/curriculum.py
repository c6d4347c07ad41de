"""Which environment next, and which of its tasks.

Environments are drawn by weight and tasks by sampler, both from counter-based streams: the n-th draw of a run is the
same whatever happened before, so a resumed run draws what an uninterrupted one would have drawn, and no generator
state has to be saved: the counters are the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.gates import Gates, Outcome
from paceline.core.mix import Mix
from paceline.core.quarantine import Quarantine
from paceline.core.samplers.base import TaskSampler
from paceline.core.streams import key, permutation, uniform
from paceline.domain.commands import NoteQuarantine
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName
from paceline.domain.task import TaskRef

_MOST_RESTING: Final = 64
"""Tasks at rest in a row that a draw passes over: the next is drawn all the same, since a source must not run dry."""
_MOST_HELD: Final = 4096
"""Tasks in quarantine in a row. A sampler that learns may come back to one again and again: then it is drawn."""


class Source(msgspec.Struct, frozen=True):
    """What the curriculum knows of an environment's tasks."""

    env: EnvName
    size: int | None
    """Tasks of one epoch; None for an endless source, whose task n is simply index n."""
    weight: float = 1.0
    sampler: str = "shuffled"
    """`shuffled`, `sequential`, or the name of one that learns (`paceline.core.samplers`)."""
    epochs: int | None = None
    """Walks through before it is exhausted; None for ever."""
    fingerprint: str = ""
    """Changes when the tasks do; a saved position is only good for the tasks it was made on."""


class Sampler:
    """The task order of one environment. One draw is O(1), and O(size) once an epoch."""

    __slots__ = ("_epoch", "_order", "_seed", "drawn", "learning", "redraw", "resting", "source")

    def __init__(self, source: Source, seed: int, learning: TaskSampler | None = None) -> None:
        self.source = source
        self.learning = learning
        """Chooses the task, where that depends on how tasks went."""
        self.drawn = 0
        """Draws so far, redraws not counted."""
        self.redraw: deque[TaskRef] = deque()
        """Tasks that were drawn in an earlier life of the run and not finished: they come first."""
        self.resting: dict[int, int] = {}
        """Tasks that are passed over, and until which draw."""
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
        return self.redraw.popleft() if self.redraw else self.draw_fresh()

    def rests(self, index: int) -> bool:
        """Whether a gate lets a task rest."""
        until = self.resting.get(index)
        if until is not None and until < self.drawn:
            del self.resting[index]
            return False
        return until is not None

    def draw_fresh(self) -> TaskRef:
        """The next task that was not drawn before."""
        source, n = self.source, self.drawn
        self.drawn += 1
        if source.size is None:
            return TaskRef(source.env, "train", n)
        epoch, position = divmod(n, source.size)
        if self.learning is not None:
            return TaskRef(source.env, "train", self.learning.draw(n), epoch)
        if source.sampler == "sequential":
            return TaskRef(source.env, "train", position, epoch)
        if epoch != self._epoch or self._order is None:
            self._order = permutation(self._seed, source.size, "order", source.env, epoch)
            self._epoch = epoch
        return TaskRef(source.env, "train", int(self._order[position]), epoch)


class Curriculum:
    """Draws groups over all training environments."""

    __slots__ = ("_draws", "_gates", "_key", "mix", "quarantine", "samplers", "skipped")

    def __init__(
        self,
        sources: Sequence[Source],
        seed: int,
        *,
        mix: Mix | None = None,
        learning: Mapping[EnvName, TaskSampler] = {},
        gates: Mapping[EnvName, Gates] = {},
        quarantine: Quarantine | None = None,
    ) -> None:
        """`mix` says the shares of draws; without it they are the weights. `learning`: samplers that learn.
        `quarantine`: tasks that nothing can be made of."""
        self._gates = gates
        self.samplers = {source.env: Sampler(source, seed, learning.get(source.env)) for source in sources}
        self.mix = mix
        self.quarantine = quarantine or Quarantine({})
        self.skipped: list[TaskRef] = []
        """What the last draw passed over."""
        self._key = key(seed, "mix")
        self._draws = 0

    @property
    def exhausted(self) -> bool:
        return all(sampler.exhausted for sampler in self.samplers.values())

    def closed(self, task: TaskRef, result: GroupResult) -> str:
        """A group of a task was processed: what it brought is told to the task's sampler, its gates and the mix. Returns
        why the gates do not let it train; empty if they do."""
        sampler = self.samplers.get(task.env)
        if sampler is not None and sampler.learning is not None:
            sampler.learning.seen(task.index, result.reward_mean, result.reward_variance)
        refused = ""
        if sampler is not None and (gates := self._gates.get(task.env)) is not None:
            judged = gates.judge(Outcome.of(task.index, result))
            refused = judged.refuses
            if judged.rests:
                sampler.resting[task.index] = sampler.drawn + judged.rests
        if self.mix is not None:
            queued = [v for v in result.verdicts if v.fate == "queued" and not refused]
            tokens = sum([sample.tokens for verdict in queued for sample in verdict.samples])
            self.mix.returned(task.env, len(queued), tokens)
        return refused

    def goes_on(self, env: EnvName) -> None:
        """A group of it is under way that was not drawn now: of an earlier life, put off before, or split from another."""
        if self.mix is not None and env in self.samplers:
            self.mix.drawn(env)

    def quarantined(self, task: TaskRef, result: GroupResult) -> NoteQuarantine | None:
        """What to tell when a group that was processed is one too many that failed: its task is not drawn any more."""
        note = self.quarantine.closed(task, result)
        sampler = self.samplers.get(task.env)
        if note is not None and sampler is not None:
            sampler.redraw = deque(each for each in sampler.redraw if each.index != task.index)
        return note

    def draw(self, may: Callable[[EnvName], bool]) -> TaskRef | None:
        """`_draw`, past what rests or is in quarantine (`skipped`), told to the mix."""
        self.skipped = []
        draws, task = self._draws, self._draw(may)
        while task is not None and self._passes_over(task):
            self.skipped.append(task)
            if self._draws > draws:  # the mix has chosen the environment, which has others
                task = self.samplers[task.env].draw_fresh()
            else:  # it was to be drawn again, and is not: the next may be of another environment
                task = self._draw(may)
        if task is not None and self.mix is not None:
            self.mix.drawn(task.env)
        return task

    def _passes_over(self, task: TaskRef) -> bool:
        passed = len(self.skipped)
        if self.quarantine.holds(task):
            return passed < _MOST_HELD
        sampler = self.samplers[task.env]
        return passed < _MOST_RESTING and not sampler.exhausted and sampler.rests(task.index)

    def _draw(self, may: Callable[[EnvName], bool]) -> TaskRef | None:
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
        weights = [s.source.weight for s in open_to]
        if self.mix is not None:
            weights = self.mix.shares([s.source.env for s in open_to])
        at = uniform(self._key, number) * sum(weights)
        for sampler, weight in zip(open_to, weights, strict=True):
            at -= weight
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
        learnt = {env: s.learning.snapshot() for env, s in self.samplers.items() if s.learning is not None}
        return {
            "draws": self._draws,
            "mix": None if self.mix is None else self.mix.snapshot(),
            "learnt": learnt,
            "gates": {env: gates.snapshot() for env, gates in self._gates.items()},
            "resting": {
                env: [[task, until] for task, until in s.resting.items()]
                for env, s in self.samplers.items()
                if s.resting
            },
            "quarantine": self.quarantine.snapshot(),
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
        if self.mix is not None and state.get("mix"):
            self.mix.restore(state["mix"])
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
                if (quarantine := state.get("quarantine")) is not None:
                    self.quarantine.restore(quarantine, env)
                learnt = state.get("learnt", {}).get(env)
                if sampler.learning is not None and learnt is not None:
                    sampler.learning.restore(learnt)
                sampler.resting = {task: until for task, until in state.get("resting", {}).get(env, ())}
                if (gates := self._gates.get(env)) is not None:
                    gates.restore(state.get("gates", {}).get(env, {}))
        return warnings
