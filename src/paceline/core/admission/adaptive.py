"""The published controller: grow by turnover, trim, cut, drain, escalate. One for each engine.

The rules are those of prime-rl's concurrency controller; the constants are its constants. They count in polls of about
5 s, so readings that come more often are gathered until a poll's time has passed. What it sheds is parked by the core.

                    usage > .6, a queue on two polls          usage > .8: cap = active · .7 / usage
      clear ──────────────▶ soft: no growth                    (at most every 6 polls; above .9 sheds the excess)
        ▲
        │ 6 polls of grace     preemption · .8, queue for 6 polls · .9, either within the grace · .5
    escalated ◀── drained ◀── draining: nothing grows until active <= cap and the signs are gone
"""

from __future__ import annotations

from typing import Any, Final, Literal

from paceline.core.admission.base import Admission, Bounds, Burst, Counter, Holdings
from paceline.core.admission.outside import OutsideView
from paceline.core.flights import Flight
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo, EngineLoad

POLL_S: Final = 5.0
TURNOVER_GROWTH: Final = 1.25
BINDING_FRACTION: Final = 0.9
GROW_BELOW: Final = 0.6
SOFT_CAP: Final = 0.8
HARD_CAP: Final = 0.9
TARGET: Final = 0.7
TRIM_COOLDOWN: Final = 6
QUEUE_RATIO: Final = 0.5
QUEUE_POLLS: Final = 6
QUEUE_CUT: Final = 0.9
PREEMPTION_CUT: Final = 0.8
ESCALATED_CUT: Final = 0.5
GRACE_POLLS: Final = 6
GROWTH_VALID_S: Final = 15.0
SILENT_POLLS: Final = 3
"""Polls without a single reading after which an engine counts as one that gives none."""

Signal = Literal["clear", "soft", "hard"]


class EngineCap:
    """The state of one engine's controller."""

    __slots__ = (
        "_bounds",
        "_poll_at",
        "_preempted",
        "_preemptions",
        "bootstrapped",
        "burst",
        "capacity",
        "cooldown",
        "draining",
        "escalated",
        "grace",
        "growth_until",
        "limit",
        "outside",
        "queue_polls",
        "reason",
        "shed",
        "signal",
        "silent",
        "turnover",
        "waited",
    )

    def __init__(self, bounds: Bounds, start: float | None) -> None:
        self._bounds = bounds
        self.bootstrapped = start is not None
        self.limit = 0.0
        self.set(1.0 if start is None else start)
        self.reason = (
            "the least, until the engine says how much it holds" if start is None else "where it began"
        )
        self.burst = Burst(bounds.group)
        self.turnover = 0.0
        """Completions over rollouts in flight, added up: 1 when about everything has been replaced once."""
        self.growth_until = float("-inf")
        self.cooldown = 0
        self.draining = False
        self.escalated = False
        self.grace = 0
        self.queue_polls = 0
        self.waited = False
        self.signal: Signal = "clear"
        self.shed = 0
        self.silent = 0
        self.outside: OutsideView | None = None
        self._preemptions = Counter()
        self._preempted = 0
        self._poll_at = float("-inf")

    def set(self, limit: float) -> None:
        self.limit = self._bounds.clamp(limit)

    @property
    def cap(self) -> int:
        return max(1, int(self.limit + 1e-9))

    def bootstrap(self, info: EngineInfo) -> None:
        """As many rollouts as fit at their longest."""
        length = info.max_model_len or self._bounds.longest
        if self.bootstrapped or info.kv_tokens is None or length is None:
            return
        self.bootstrapped = True
        self.set(info.kv_tokens // length)
        self.reason = f"{info.kv_tokens} KV tokens, contexts of up to {length}"

    def completed(self, inflight: int, tokens: int, now: float) -> None:
        """A rollout ended; `inflight` counts it."""
        self.turnover += 1.0 / inflight
        if tokens > 0 and now <= self.growth_until and inflight >= BINDING_FRACTION * self.limit:
            self.set(self.limit * TURNOVER_GROWTH ** (1.0 / inflight))
            self.reason = f"room below {GROW_BELOW:.0%}, and a rollout has been replaced"

    def observe(self, load: EngineLoad, inflight: int, now: float) -> None:
        self.silent = 0
        self.outside = None
        self._preempted += self._preemptions.growth(load.preemptions)
        if now < self._poll_at + POLL_S - 1e-6:
            return
        self._poll_at = now
        preempted, self._preempted = self._preempted, 0
        self._poll(load, preempted, inflight, now)

    def _poll(self, load: EngineLoad, preempted: int, inflight: int, now: float) -> None:
        queued = load.waiting > QUEUE_RATIO * load.running and load.running > 0
        self.queue_polls = self.queue_polls + 1 if queued else 0
        overloaded = self.queue_polls >= QUEUE_POLLS
        if preempted or overloaded:
            self.signal = "hard"
        elif (load.waiting and self.waited) or load.kv_usage > GROW_BELOW:
            self.signal = "soft"
        else:
            self.signal = "clear"
        self.waited = load.waiting > 0
        if self.draining:
            if inflight <= self.limit and not preempted and not overloaded:
                self.draining = False
                self.grace = GRACE_POLLS
        elif self.escalated:
            self.grace -= 1
            if self.grace <= 0:
                self.escalated = False
        self.cooldown = max(0, self.cooldown - 1)
        can_grow = self.signal == "clear" and not load.waiting and not self.draining
        self.growth_until = now + GROWTH_VALID_S if can_grow else float("-inf")
        if self.draining:
            return
        if preempted or overloaded:
            self._cut(preempted, inflight)
        elif load.kv_usage > SOFT_CAP and inflight and not self.cooldown:
            self._trim(load.kv_usage, inflight)

    def _cut(self, preempted: int, inflight: int) -> None:
        if self.escalated:
            fraction = ESCALATED_CUT
        else:
            fraction = PREEMPTION_CUT if preempted else QUEUE_CUT
        if not preempted:
            self.queue_polls = 0
        self.set(min(self.limit, inflight * fraction))
        self.shed = max(0, inflight - self.cap)
        self.draining = self.escalated = True
        why = f"{preempted} preemptions" if preempted else f"a queue for {QUEUE_POLLS} polls"
        self.reason = f"{why}: cut to {fraction:.0%} of the {inflight} in flight"

    def _trim(self, usage: float, inflight: int) -> None:
        self.set(min(self.limit, inflight * TARGET / usage))
        self.cooldown = TRIM_COOLDOWN
        self.reason = f"{usage:.0%} of the KV cache in use: trimmed to {TARGET:.0%}"
        if usage > HARD_CAP:
            self.shed = max(0, inflight - self.cap)

    def silence(self, now: float) -> None:
        """A reading did not come: nothing is freed by that, and nothing is cut."""
        self.growth_until = float("-inf")
        if now < self._poll_at + POLL_S - 1e-6:
            return
        self._poll_at = now
        self.silent += 1
        if self.silent >= SILENT_POLLS and self.outside is None:
            self.outside = OutsideView(self.limit)
            self.reason = self.outside.reason


class AdaptiveCap(Admission):
    """The published rules, one state for each engine."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._engines: dict[EngineId, EngineCap] = {}
        self._saved: dict[str, float] = {}

    def __getitem__(self, engine: EngineId) -> EngineCap:
        state = self._engines.get(engine)
        if state is None:
            start = self._saved.get(engine, self._bounds.initial)
            state = self._engines[engine] = EngineCap(self._bounds, start)
        return state

    def joined(self, info: EngineInfo) -> None:
        self[info.id].bootstrap(info)

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        state = self[engine.id]
        state.burst.roll(now)
        if load is None:
            state.silence(now)
        else:
            state.observe(load, engine.active, now)

    def started(self, engine: Holdings, flight: Flight, now: float) -> None:
        burst = self[engine.id].burst
        burst.roll(now)
        burst.started()

    def segment_ended(
        self,
        engine: Holdings,
        flight: Flight,
        sampled: int,
        cached: int,
        seconds: float,
        error: str | None,
        now: float,
        *,
        is_busy: bool = False,
    ) -> None:
        state = self[engine.id]
        if state.outside is not None:
            state.outside.segment_ended(sampled, seconds, engine.active, is_busy=is_busy)
            state.set(state.outside.cap)
            state.outside.cap = state.limit
            state.reason = state.outside.reason

    def ended(self, engine: Holdings, flight: Flight, now: float) -> None:
        state = self[engine.id]
        state.burst.ended(by_itself=flight.cancelled is None)
        if flight.cancelled is None:
            state.completed(engine.active + 1, flight.sampled, now)

    def cap(self, engine: EngineId) -> int:
        return self[engine].cap

    def room(self, engine: EngineId, active: int) -> int:
        state = self[engine]
        cap = state.cap
        return min(cap - active, state.burst.left(cap))

    def to_park(self, engine: EngineId, active: int) -> int:
        state = self[engine]
        shed, state.shed = state.shed, 0
        return min(shed, active - 1)

    def reason(self, engine: EngineId) -> str:
        return self[engine].reason

    def snapshot(self) -> dict[str, Any]:
        return {"type": "adaptive", "caps": {name: state.limit for name, state in self._engines.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("type") == "adaptive":
            self._saved = {str(name): float(cap) for name, cap in state["caps"].items()}
