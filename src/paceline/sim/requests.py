"""The engine requests of a journal, and what each met on its engine: what a fit of the engine's constants goes by.

All requests of an engine share its steps, so what one took depends on all that ran beside it. Between two moments at which a
request comes or ends, who runs is known, and each context is taken to grow evenly. A stretch counts by the steps that were
made in it: as many as its requests sampled tokens a second, each on its own mean. Time in which the engine takes new weights
is no time of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId

Record: TypeAlias = tuple[float, Event, Sequence[Command]]
"""When, what happened, and what was decided: as journals have it."""


class Request(msgspec.Struct, frozen=True):
    """One that ended by itself, and what its engine did while it was there."""

    seconds: float
    """It was there, without those in which the engine took weights."""
    steps: int
    """Tokens that it sampled, one in each."""
    sequences: float
    """That were in these steps, in all."""
    context: float
    """Tokens of their contexts, in all."""
    padded: float
    """What these were if all were as long as the longest of their step."""
    prefilled: int
    """Prompt tokens that were not cached, of all requests that came meanwhile, its own included."""
    attended: float
    """Tokens of context before each of them, in all."""
    came: int
    """Requests that came meanwhile, itself included."""


class _Call:
    """A request under way."""

    def __init__(self, came: float, context: int) -> None:
        self.came = came
        self.context = context
        self.ended: float | None = None
        self.sampled = 0
        self.missed = 0
        """Prompt tokens that were not cached."""
        self.is_whole = False
        """Whether it ended by itself."""
        self.rate = 0.0
        """Tokens a second, on the mean."""


class _Life:
    """One engine, as long as a run lives."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        """As they came."""
        self.changes: list[tuple[float, bool]] = []
        """When it began to take weights, and when it was ready again."""


class _Sums(msgspec.Struct):
    """Over the time of one engine."""

    seconds: float = 0.0
    steps: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    padded: float = 0.0
    came: int = 0
    prefilled: int = 0
    attended: float = 0.0


def requests_of(records: Iterable[Record]) -> list[Request]:
    """Of one run or of several, one after the other: those that ended by themselves, on engines that did not fail."""
    seen = _Seen()
    for at, event, commands in records:
        seen.apply(at, event, commands)
    seen.end()
    return [request for life in seen.lives for request in _met(life)]


class _Seen:
    """Gathers calls."""

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self._engines: dict[EngineId, _Life] = {}
        self._asked: dict[RolloutId, int] = {}
        self._open: dict[RolloutId, _Call] = {}
        self._last = 0.0

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.RunOpened):
            # Another life, or another run: nothing of the one before is under way any more.
            self.end()
        elif isinstance(event, on.TurnRequested):
            self._asked[event.rollout] = event.context_tokens
        elif isinstance(event, on.SegmentEnded):
            self._segment_ended(at, event)
        elif isinstance(event, on.WeightsLoaded | on.EngineLost):
            self._engine(event.engine).changes.append((at, True))
        self._last = at
        for command in commands:
            if isinstance(command, do.GrantTurn):
                call = _Call(at, self._asked.get(command.rollout, 0))
                self._open[command.rollout] = call
                self._engine(command.engine).calls.append(call)
            elif isinstance(command, do.UpdateWeights):
                self._engine(command.engine).changes.append((at, False))

    def _segment_ended(self, at: float, event: on.SegmentEnded) -> None:
        call = self._open.pop(event.rollout, None)
        if call is None:
            return
        call.ended = at
        call.sampled = sum(n for _, n in event.versions)
        call.is_whole = event.error is None and call.sampled > 0
        if call.is_whole:
            call.missed = max(0, call.context - event.cached_tokens)
        if at > call.came:
            call.rate = call.sampled / (at - call.came)

    def _engine(self, name: EngineId) -> _Life:
        life = self._engines.get(name)
        if life is None:
            life = self._engines[name] = _Life()
            self.lives.append(life)
        return life

    def end(self) -> None:
        """Nothing more comes of this life."""
        for call in self._open.values():
            call.ended = self._last
        self._engines, self._asked, self._open, self._last = {}, {}, {}, 0.0


def _met(life: _Life) -> list[Request]:
    """Its whole requests, in the order in which they ended."""
    # What ends comes before what comes, and a change of weights before both.
    moments: list[tuple[float, int, _Call | None, bool]] = [
        (at, 0, None, works) for at, works in life.changes
    ]
    for each in life.calls:
        if each.ended is not None and each.ended > each.came:
            moments += [(each.ended, 1, each, False), (each.came, 2, each, True)]
    moments.sort(key=lambda moment: moment[:2])
    found: list[Request] = []
    began: dict[_Call, _Sums] = {}
    sums, works, before = _Sums(), True, 0.0
    for at, _, call, begins in moments:
        if works and began and at > before:
            _go_on(sums, began, before, at)
        before = at
        if call is None:
            works = begins
        elif begins:
            began[call] = msgspec.structs.replace(sums)
            sums.came += 1
            sums.prefilled += call.missed
            sums.attended += call.missed * (call.context - call.missed / 2)
        else:
            since = began.pop(call, None)
            if since is not None and call.is_whole and works and sums.seconds > since.seconds:
                found.append(_request(call, since, sums))
    return found


def _go_on(sums: _Sums, running: Iterable[_Call], since: float, until: float) -> None:
    """Add a stretch in which these run."""
    seconds, middle = until - since, (since + until) / 2
    sequences, told, rates, context, longest = 0, 0, 0.0, 0.0, 0.0
    for call in running:
        sequences += 1
        if call.rate:
            told += 1
            rates += call.rate
        now = call.context + call.rate * (middle - call.came)
        context += now
        longest = max(longest, now)
    steps = rates / told * seconds if told else 0.0
    sums.seconds += seconds
    sums.steps += steps
    sums.sequences += steps * sequences
    sums.context += steps * context
    sums.padded += steps * sequences * longest


def _request(call: _Call, since: _Sums, until: _Sums) -> Request:
    share = call.sampled / (until.steps - since.steps)
    return Request(
        seconds=until.seconds - since.seconds,
        steps=call.sampled,
        sequences=share * (until.sequences - since.sequences),
        context=share * (until.context - since.context),
        padded=share * (until.padded - since.padded),
        prefilled=until.prefilled - since.prefilled,
        attended=until.attended - since.attended,
        came=until.came - since.came,
    )
