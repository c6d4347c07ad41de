"""The engine requests of a journal, and what each met on its engine: what a fit of the engine's constants goes by.

All requests of an engine share its steps, so what one took depends on all that ran beside it. Between two moments at which a
request comes or ends, who runs is known, and each context is taken to grow evenly. A stretch counts by the steps that were
made in it: as many as its requests saw in a second, each on its own mean. Time in which the engine takes new weights is no time of a
request.

A request that comes in the middle of a step waits for its end. That is nearly a whole step where an answer has just gone out, since the
next step is under way by then, half of one where it comes at any moment, and none on an engine that was idle. Short answers see
a twentieth more steps so than they sample tokens, and long ones hardly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import fsum, inf
from typing import TypeAlias

import msgspec

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, GroupId, RolloutId, Version

Record: TypeAlias = tuple[float, Event, Sequence[Command]]
"""When, what happened, and what was decided: as journals have it."""


class Stretch(msgspec.Struct, frozen=True):
    """What an engine did in some of its time."""

    seconds: float
    """In which it computed: without those in which nothing ran, or it took weights."""
    steps: float
    sequences: float
    """That were in these steps, in all."""
    context: float
    """Tokens of their contexts, in all."""
    padded: float
    """What these were if all were as long as the longest of their step."""
    again: float
    """Tokens of `context` that another sequence of the same step has in the same blocks, each but once: prompts that the members of a
    group share. What groups share with other groups is not told by a journal, and not counted."""
    prefilled: float
    """Prompt tokens that were not cached, of all requests that entered meanwhile."""
    attended: float
    """Tokens of context before each of them, in all."""
    came: float
    """Requests that entered meanwhile."""

    def __sub__(self, other: Stretch) -> Stretch:
        """What came after `other`, which begins with this one."""
        return Stretch(*(a - b for a, b in zip(*map(msgspec.structs.astuple, (self, other)), strict=True)))


class EngineTime(msgspec.Struct, frozen=True):
    """What was recorded of engines."""

    requests: list[Stretch]
    """While each request was there that ended by itself; those of one time share it."""
    stretches: list[Stretch]
    """From the end of one of them to that of the next, on the same engine: all of its time, and nothing twice."""


class _Group:
    """What the members of a group have in common."""

    def __init__(self) -> None:
        self.prompt = 0
        """Tokens that one of them found in a prefix cache when it began."""


class _Call:
    """A request under way."""

    def __init__(self, came: float, context: int, group: _Group, version: Version, *, is_first: bool) -> None:
        """`version`: of the policy; what prefix caches hold is of one. `is_first`: of its rollout."""
        self.came = came
        self.context = context
        self.group = group
        self.version = version
        self.is_first = is_first
        self.ended: float | None = None
        self.sampled = 0
        self.missed = 0
        """Prompt tokens that were not cached."""
        self.is_whole = False
        """Whether it ended by itself."""
        self.rate = 0.0
        """Tokens a second in which its engine worked, on the mean."""
        self.pace = 0.0
        """Steps that it saw in such a second; 0 where that is not known."""
        self.took_part = 1.0
        """Share of these that computed something of it."""
        self.read = 1.0
        """Share that read its context. In the step that ends its prefill it samples its first token, and what it attends to then
        is counted with the prefill."""

    def waits(self, steps: float) -> None:
        """It sees so many steps before that which samples its first token."""
        if self.rate:
            saw = self.sampled + steps
            self.pace = self.rate * saw / self.sampled
            self.took_part, self.read = self.sampled / saw, (self.sampled - 1) / saw


class _Life:
    """One engine, as long as a run lives."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        """As they came."""
        self.changes: list[tuple[float, bool]] = []
        """When it began to take weights, and when it was ready again."""


def engine_time(records: Iterable[Record], max_batched_tokens: int = 8192) -> EngineTime:
    """Of all engines of one run or of several, one after the other. `max_batched_tokens`: most tokens of one of their steps; a
    longer prompt takes several."""
    seen = _Seen()
    for at, event, commands in records:
        seen.apply(at, event, commands)
    seen.end()
    found = EngineTime([], [])
    for life in seen.lives:
        _add(life, found, max_batched_tokens)
    return found


class _Seen:
    """Gathers calls."""

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self._engines: dict[EngineId, _Life] = {}
        self._asked: dict[RolloutId, int] = {}
        self._open: dict[RolloutId, _Call] = {}
        self._begun: set[RolloutId] = set()
        """Rollouts of which the next call is not the first."""
        self._groups: dict[GroupId, _Group] = {}
        self._last = 0.0

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.RunOpened):
            # Another life, or another run: nothing of the one before is under way any more.
            self.end()
        elif isinstance(event, on.RolloutContinued):
            self._begun.add(event.rollout)  # what it finds cached may be its own conversation
        elif isinstance(event, on.TurnRequested):
            self._asked[event.rollout] = event.context_tokens
        elif isinstance(event, on.SegmentEnded):
            self._segment_ended(at, event)
        elif isinstance(event, on.WeightsLoaded | on.EngineLost):
            self._engine(event.engine).changes.append((at, True))
        self._last = at
        for command in commands:
            if isinstance(command, do.GrantTurn):
                self._begin(at, command)
            elif isinstance(command, do.UpdateWeights):
                self._engine(command.engine).changes.append((at, False))

    def _begin(self, at: float, command: do.GrantTurn) -> None:
        rollout = command.rollout
        group = self._groups.setdefault(rollout.group, _Group())
        is_first = rollout not in self._begun
        self._begun.add(rollout)
        call = _Call(at, self._asked.get(rollout, 0), group, command.version, is_first=is_first)
        self._open[rollout] = call
        self._engine(command.engine).calls.append(call)

    def _segment_ended(self, at: float, event: on.SegmentEnded) -> None:
        call = self._open.pop(event.rollout, None)
        if call is None:
            return
        call.ended = at
        call.sampled = sum(n for _, n in event.versions)
        call.is_whole = event.error is None and call.sampled > 0
        if call.is_whole:
            call.missed = max(0, call.context - event.cached_tokens)
            if call.is_first:
                call.group.prompt = max(call.group.prompt, call.context - call.missed)

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
        self._begun, self._groups = set(), {}


_ENDS, _COMES, _ENTERS = 0, 1, 2
"""In the order in which they happen at one moment."""
_Moment: TypeAlias = tuple[float, int, _Call]
"""When, in seconds that the engine has worked; what; of which call."""


def _add(life: _Life, found: EngineTime, max_batched_tokens: int) -> None:
    moments = _moments(life)
    moments += _entries(moments, max_batched_tokens)
    moments.sort(key=lambda moment: moment[:2])
    began: dict[_Call, Stretch] = {}
    sums, before = _Sums(), 0.0
    last = sums.so_far()
    for at, what, call in moments:
        if began and at > before:
            sums.go_on(began, before, at)
        before = at
        if what == _COMES:
            began[call] = sums.so_far()
        elif what == _ENTERS:
            sums.enters(call)
        else:
            since, now = began.pop(call), sums.so_far()
            if call.is_whole and now.seconds > since.seconds:
                found.requests.append(now - since)
                found.stretches.append(now - last)
                last = now


def _moments(life: _Life) -> list[_Moment]:
    """At which a call comes or ends. One in whose time the engine did nothing but take weights is left out: granted in the moment in
    which a load begins, or to an engine that was taken out while it loads and has joined again, and over before the load is."""
    # A change of weights comes before both.
    seen: list[tuple[float, int, _Call | None, bool]] = [(at, -1, None, works) for at, works in life.changes]
    for call in life.calls:
        if call.ended is not None and call.ended > call.came:
            seen += [(call.ended, _ENDS, call, False), (call.came, _COMES, call, False)]
    seen.sort(key=lambda moment: moment[:2])
    moments: list[_Moment] = []
    unserved: set[_Call] = set()
    worked, works, before = 0.0, True, 0.0
    for at, what, changed, works_now in seen:
        if works:
            worked += at - before
        before = at
        if changed is None:
            works = works_now
            continue
        if what == _COMES:
            changed.came = worked
        elif worked > changed.came:
            changed.rate = changed.sampled / (worked - changed.came)
        else:
            unserved.add(changed)
        moments.append((worked, what, changed))
    return [moment for moment in moments if moment[2] not in unserved]


def _entries(moments: Iterable[_Moment], max_batched_tokens: int) -> list[_Moment]:
    """When each call enters: once the step under way is over, at once where nothing runs. Also notes how many steps it sees before
    that which samples its first token: this one, and those that compute but a part of its prompt."""
    running: set[_Call] = set()
    answered = -inf
    entries: list[_Moment] = []
    for at, what, call in moments:
        if what == _ENDS:
            running.discard(call)
            answered = at
            continue
        waits, step_s = 0.0, 0.0
        rates = [other.rate for other in running if other.rate]
        if rates:
            step_s = len(rates) / fsum(rates)
            waits = 1.0 - (at - answered) / step_s if at - answered < step_s else 0.5
        call.waits(waits + max(0, -(-call.missed // max_batched_tokens) - 1))
        entries.append((at + waits * step_s, _ENTERS, call))
        running.add(call)
    return entries


class _Sums:
    """Over the time of one engine."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(Stretch.__struct_fields__, 0.0)

    def so_far(self) -> Stretch:
        return Stretch(**self._sums)

    def enters(self, call: _Call) -> None:
        """All of its prompt that is not cached is computed now."""
        self._add(prefilled=call.missed, attended=call.missed * (call.context - call.missed / 2), came=1)

    def go_on(self, running: Collection[_Call], since: float, until: float) -> None:
        """A stretch in which these run."""
        seconds, middle = until - since, (since + until) / 2
        paces = [call.pace for call in running if call.pace]
        pace = fsum(paces) / len(paces) if paces else 0.0
        sequences = readers = context = longest = again = 0.0
        met: set[tuple[_Group, Version]] = set()
        for call in running:
            # What is never told of the last ones: they are taken to be as fast as the others.
            now = call.context + (call.rate or pace) * (middle - call.came)
            sequences += call.took_part
            readers += call.read
            context += call.read * now
            if now > longest:
                longest = now
            if call.group.prompt:  # in the cache of this engine once for all members under one version
                siblings = call.group, call.version
                if siblings in met:
                    again += call.read * call.group.prompt
                else:
                    met.add(siblings)
        steps = pace * seconds
        self._add(
            seconds=seconds,
            steps=steps,
            sequences=steps * sequences,
            context=steps * context,
            padded=steps * readers * longest,
            again=steps * again,
        )

    def _add(self, **more: float) -> None:
        for name, much in more.items():
            self._sums[name] += much
