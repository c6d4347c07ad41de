"""Prefill and decode on engines of their own, behind one address.

    request ─▶ prefill engine ─▶ its KV moves ─▶ decode engine ─▶ reply
                     ▲                                  │
                     └──────── preempted: once more ◀───┘

The core sees one engine, with the KV of the decode engine; which prefill engine computes a context is decided here, as by the
proxy before such engines. A request goes where its context is computed soonest: by what waits there and by what of it the
prefix cache there has (as Mooncake does, arXiv:2407.00079). KV moves over one link into the decode engine, one context after
the other, and only what the decode engine's own prefix cache lacks. The decode engine computes the last block of a context
anew, and with it samples the first token; so does vLLM, which computes the last token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, TypeAlias

import msgspec
from pydantic import Field

from paceline.config.base import Section
from paceline.domain.ids import Version
from paceline.domain.load import EngineLoad
from paceline.sim.engine.calls import Call, Totals
from paceline.sim.engine.model import EngineModel
from paceline.sim.engine.speed import Speed

Recompute: TypeAlias = Literal["prefill", "decode"]


class PrefillEngines(Section):
    """Prefill engines of each engine; that one then only decodes."""

    count: int = Field(default=1, ge=1)
    """How many serve one decode engine."""
    gpu: str | None = None
    """Their GPU; none: that of the decode engine."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs of one of them; none: as many as a decode engine has."""
    link_gb_s: float = Field(default=40.0, gt=0)
    """Gigabytes a second at which KV moves into a decode engine."""
    link_s: float = Field(default=1e-3, ge=0)
    """Seconds until a move begins."""
    recompute: Recompute = "prefill"
    """Who computes the context of a preempted request again: the prefill engines, or the decode engine itself, as vLLM's NIXL
    connector has it (one move a request)."""


class Link(msgspec.Struct, frozen=True):
    """What moving KV into a decode engine takes, in seconds."""

    token_s: float
    setup_s: float = 0.0


class DecodeEngine(EngineModel):
    """Lets what it preempts be computed elsewhere, if it `hands_back`."""

    def __init__(self, speed: Speed, version: Version, *, hands_back: bool) -> None:
        super().__init__(speed, version)
        self.handed_back: list[Call] = []
        """Preempted, the first to be computed again first."""
        self._hands_back = hands_back

    def _line_up(self, call: Call) -> None:
        call.restored = 0  # what had been moved here is gone
        if self._hands_back:
            self.handed_back.insert(0, call)
        else:
            super()._line_up(call)

    def withdraw(self) -> list[Call]:
        """Take out all that waits, in order."""
        waits = [call for call in self._waiting if not call.has_left]
        self._waiting.clear()
        self._dead_waiting = 0
        for call in waits:
            call.restored = 0
        return waits

    def mark(self, call: Call) -> None:
        """What `call` has sampled, it has by the version that is held now."""
        self._mark(call)

    def kill(self) -> list[Call]:
        self.handed_back.clear()
        return super().kill()


class _Stage(msgspec.Struct):
    """A context that a prefill engine is asked for."""

    call: Call
    """Whose it is."""
    part: Call
    """The request to the prefill engine."""
    engine: int
    tokens: int
    """That it had to compute, by what was known when it came."""


class SplitEngine:
    """One decode engine and those that prefill for it."""

    def __init__(
        self,
        speed: Speed,
        prefill: Sequence[Speed],
        link: Link,
        *,
        recompute: Recompute = "prefill",
        version: Version = 0,
    ) -> None:
        """`speed`: of the decode engine; `prefill`: of each prefill engine, at least one."""
        self.decode = DecodeEngine(speed, version, hands_back=recompute == "prefill")
        self.prefill = [EngineModel(each, version) for each in prefill]
        self._link = link
        self._recomputed = 0
        self._reset()

    def _reset(self) -> None:
        self._stages: dict[Hashable, _Stage] = {}
        self._backlog = [0] * len(self.prefill)
        """Tokens that each prefill engine has still to compute."""
        self._moves: list[tuple[float, int, Call]] = []
        """Contexts on their way, by when they arrive; some of them of calls that were aborted."""
        self._moving: dict[Hashable, Call] = {}
        self._cached: dict[Hashable, int] = {}
        """By call: tokens of its context that no engine had to compute when it came."""
        self._link_free_at = 0.0
        self._order = 0
        self._done: list[Call] = []
        self._drains = False
        self._decode_drains = False
        """Whether the decode engine was told: once nothing more can come to it."""

    # ── what it tells ──

    @property
    def speed(self) -> Speed:
        return self.decode.speed

    @property
    def version(self) -> Version:
        return self.decode.version

    @version.setter
    def version(self, version: Version) -> None:
        for engine in (self.decode, *self.prefill):
            engine.version = version

    @property
    def next_at(self) -> float:
        soonest = min([engine.next_at for engine in self.prefill])
        moved = self._moves[0][0] if self._moves else inf
        return min(self.decode.next_at, soonest, moved)

    @property
    def is_still(self) -> bool:
        return self.decode.is_still and all([engine.is_still for engine in self.prefill])

    @property
    def totals(self) -> Totals:
        """Sampled tokens, steps and preemptions are the decode engine's; what was found in a prefix cache, a prefill engine's."""
        decode, prefill = self.decode.totals, [engine.totals for engine in self.prefill]
        count = 1 + len(prefill)
        return Totals(
            generated=decode.generated,
            prefilled=decode.prefilled + sum(t.prefilled for t in prefill),
            recomputed=decode.recomputed + self._recomputed,
            queries=sum(t.queries for t in prefill),
            hits=sum(t.hits for t in prefill),
            preemptions=decode.preemptions + sum(t.preemptions for t in prefill),
            steps=decode.steps,
            passes=decode.passes,
            events=decode.events + sum(t.events for t in prefill),
            busy_s=(decode.busy_s + sum(t.busy_s for t in prefill)) / count,
            kv_area=decode.kv_area,
        )

    def load(self, now: float) -> EngineLoad:
        """KV is the decode engine's; what is being prefilled or moved waits."""
        told = self.decode.load(now)
        prefill = [engine.totals for engine in self.prefill]
        return msgspec.structs.replace(
            told,
            waiting=told.waiting + len(self._stages) + len(self._moving),
            preemptions=told.preemptions + sum(t.preemptions for t in prefill),
            prefix_queries=sum(t.queries for t in prefill),
            prefix_hits=sum(t.hits for t in prefill),
        )

    def busy_until(self, now: float) -> tuple[float, float]:
        busy_s, area = self.decode.busy_until(now)
        others = sum(engine.busy_until(now)[0] for engine in self.prefill)
        return (busy_s + others) / (1 + len(self.prefill)), area

    # ── requests ──

    def submit(self, call: Call, now: float) -> None:
        self._to_prefill(call, now)

    def _to_prefill(self, call: Call, now: float) -> None:
        context = call.prompt + call.sampled
        # Its one token is thrown away: the decode engine samples.
        reusable = call.reusable if call.entry < 0 else None
        part = Call(
            call.key, context, 1, own=call.own, chain=call.chain, block=self.speed.block, reusable=reusable
        )
        missing = [context - engine.found(part, context) for engine in self.prefill]
        chosen = min(range(len(missing)), key=lambda n: self._backlog[n] + missing[n])
        self._stages[call.key] = _Stage(call, part, chosen, missing[chosen])
        self._backlog[chosen] += missing[chosen]
        self.prefill[chosen].submit(part, now)

    def _prefilled(self, key: Hashable, now: float) -> None:
        """Its context is computed: what the decode engine lacks of it moves there."""
        stage = self._stages.pop(key)
        call, part = stage.call, stage.part
        self._backlog[stage.engine] -= stage.tokens
        if key in self._cached:
            self._recomputed += part.prompt - part.cached
        else:
            self._cached[key] = part.cached
        moved = part.prompt - self.decode.found(call, part.prompt)
        self._link_free_at = max(now, self._link_free_at) + moved * self._link.token_s
        self._order += 1
        self._moving[key] = call
        heappush(self._moves, (self._link_free_at + self._link.setup_s, self._order, call))

    def _arrive(self, now: float) -> None:
        while self._moves and self._moves[0][0] <= now:
            _, _, call = heappop(self._moves)
            if self._moving.get(call.key) is call:
                del self._moving[call.key]
                call.restored = call.prompt + call.sampled
                self.decode.submit(call, now)

    def _hand_back(self, now: float) -> None:
        for call in self.decode.handed_back:
            self._to_prefill(call, now)
        self.decode.handed_back.clear()

    def abort(self, call: Call, now: float) -> None:
        stage = self._stages.get(call.key)
        if stage is not None and stage.call is call:
            del self._stages[call.key]
            self._backlog[stage.engine] -= stage.tokens
            self.prefill[stage.engine].abort(stage.part, now)
            self._cached.setdefault(call.key, stage.part.cached)
        elif self._moving.get(call.key) is call:
            del self._moving[call.key]
        elif call.running < 0:
            return  # it was not sent yet
        else:
            self.decode.abort(call, now)
            self._hand_back(now)
        self._settle(call)
        self._drain_decode(now)

    def _settle(self, call: Call) -> None:
        """It has ended: its reply says what no engine had to compute, and not what was moved."""
        call.cached = self._cached.pop(call.key)

    def run(self, now: float) -> list[Call]:
        while (at := self.next_at) <= now:
            for call in self.decode.run(at):
                self._settle(call)
                self._done.append(call)
            self._hand_back(at)
            self._arrive(at)
            for engine in self.prefill:
                for part in engine.run(at):
                    self._prefilled(part.key, at)
            self._drain_decode(at)
        done, self._done = self._done, []
        return done

    # ── weights, and the end ──

    def stop(self, now: float, *, drain: bool = False) -> None:
        """Stand still as one engine does; with `drain` the prefill engines first, so that what they began can end."""
        self._drains = drain
        for engine in self.prefill:
            engine.stop(now, drain=drain)
        if drain:
            self._drain_decode(now)
        else:
            self.decode.stop(now)

    def _drain_decode(self, now: float) -> None:
        """Once nothing more can come to it, the decode engine finishes what it has let in."""
        if not self._drains or self._decode_drains or self._moving:
            return
        if all([engine.is_still for engine in self.prefill]):
            self._decode_drains = True
            self.decode.stop(now, drain=True)

    def go_on(self, now: float, version: Version | None = None, *, recompute: bool = False) -> None:
        """Sample again. What is on its way or waits with KV of the old weights keeps it, or with `recompute`, or after a
        drain, is prefilled anew."""
        is_new = version is not None and version != self.version
        again: list[Call] = []
        if recompute or (self._drains and is_new):
            again = [*self.decode.withdraw(), *self._moving.values()]
            self._moving.clear()
            self._moves.clear()
        if is_new:
            away = [*(stage.call for stage in self._stages.values()), *self._moving.values(), *again]
            for call in away:
                if call.sampled:
                    self.decode.mark(call)
        self._drains = self._decode_drains = False
        for engine in self.prefill:
            engine.go_on(now, version, recompute=recompute)
        self.decode.go_on(now, version, recompute=recompute)
        for call in again:
            self._to_prefill(call, now)
        self._hand_back(now)

    def kill(self) -> list[Call]:
        """All of it is gone: neither kind of engine is of use without the other."""
        calls = [*self.decode.kill(), *(s.call for s in self._stages.values()), *self._moving.values()]
        for engine in self.prefill:
            engine.kill()
        self._reset()
        return calls
