"""The number of rollouts at which a model of the engine, learnt while it runs, yields most.

events ──▶ EnvStats (turns, contexts, waits) ──┐
       ──▶ SpeedFit (seconds of a step)     ───┼─▶ network.solve ──▶ cap      at each reading, for each engine
metrics ─▶ capacity                            │
flights ─▶ forecast.room_for ──────────────────┴─▶ room               how many of them may start now
"""

from __future__ import annotations

from math import exp, isfinite, sqrt
from typing import Any, Final

import msgspec
import numpy as np

from paceline.core.admission.base import Admission, Bounds, Burst, Counter, Holdings
from paceline.core.admission.forecast import Forecast, Survival
from paceline.core.admission.learning import EnvStats, Profile, SpeedFit
from paceline.core.admission.network import Yield, solve
from paceline.core.admission.outside import OutsideView
from paceline.core.flights import Flight
from paceline.domain.ids import EngineId, EnvName
from paceline.domain.load import EngineInfo, EngineLoad

ENOUGH_TURNS: Final = 30
"""Turns (or a quarter as many whole rollouts) after which the model is believed."""
READ_S: Final = 5.0
"""Least seconds between readings that are looked at: in less, too little happens to learn from. They may come more rarely."""
ENOUGH_WINDOWS: Final = 3
SMOOTH_S: Final = 20.0
"""Time constant of the cap: readings come every few seconds, and the model flutters with them."""
PINNED_S: Final = 22.4
"""Time constant of the calls under way."""
USABLE: Final = 0.97
"""Share of the KV cache that running calls may be reckoned to fill: the last block of each call is half empty."""
GUIDE: Final = 0.03
"""Gain of the hit rate's feedback, a reading; with about 30 readings to take full effect it does not oscillate."""
GUIDE_BOUNDS: Final = (0.8, 1.6)
FORGET: Final = 0.007
"""Of the feedback, a reading: where the hit rate hardly depends on the rollouts in flight, as with tools slower than
anything is cached for, an error of the model that always has the same sign would otherwise add up for ever."""
HORIZON_S: Final = 120.0
"""Longest look ahead."""
PINNED: Final = 0.82
"""Share of the KV cache that the forecast lets running calls take: what they hold cannot be evicted."""
REGULAR: Final = 0.3
"""Rollouts whose durations spread less than this, relative to the mean, are started evenly."""
SHED_EVERY_S: Final = 30.0
STRETCH: Final = 1.15
"""Rollouts may be this many times what yields most, as long as the forecast says that they are lighter than the mean."""
SWING: Final = 1.0
"""Standard deviations of the working set above its steady mean that starts may take it to."""
THRASH: Final = 0.25
"""Hit rate this far below what the model expects is thrashing."""
SILENT_READINGS: Final = 3
LIGHT: Final = 1 / 3
"""Share of the KV cache that contexts may fill before anything is known of how they grow."""


class _Engine:
    """What is known of one engine."""

    __slots__ = (
        "batch_ever",
        "batch_sum",
        "burst",
        "busy_s",
        "cached",
        "calls",
        "capacity",
        "credit",
        "even",
        "fit",
        "forecast",
        "generated",
        "guide",
        "half_call",
        "last",
        "limit",
        "longest",
        "missed",
        "moved_at",
        "outside",
        "pinned",
        "preemptions",
        "prefill_s",
        "prefilled",
        "prefilled_ever",
        "prefix",
        "read_at",
        "reason",
        "sampled",
        "sampled_here",
        "says_capacity",
        "seconds",
        "settled",
        "shed",
        "shed_at",
        "silent",
        "starts",
        "summed_from",
        "tokens",
        "tokens_ever",
        "tokens_sum",
    )

    def __init__(self, start: float | None, group: int) -> None:
        self.limit = start
        """The cap, before it is rounded; None until something is known."""
        self.reason = "the least, until the engine says how much it holds"
        self.capacity: float | None = None
        self.says_capacity = False
        self.longest: int | None = None
        self.settled = False
        """Whether the cap comes from the model."""
        self.moved_at = 0.0
        self.pinned = 0.0
        """Calls under way on the mean of the last readings: of the rollouts, those whose contexts cannot be evicted."""
        self.even: float | None = None
        """Rollouts in flight if starts are spread evenly over a lifetime; None where they need not be."""
        self.credit = 0.0
        """Starts that pacing allows."""
        self.read_at = float("-inf")
        self.half_call = 0.0
        """Tokens that a call under way has sampled, on the mean."""
        self.burst = Burst(group)
        self.fit = SpeedFit()
        self.forecast = Forecast()
        self.prefill_s = 0.0
        """Of one prompt token that is not cached, as the fit has it."""
        self.guide = 1.0
        """Factor on contexts, from hit rates seen."""
        self.last = 0.0
        self.calls = 0
        self.tokens = 0
        self.summed_from: float | None = None
        """Since when the sums below count: the last reading that came, or the first call."""
        self.busy_s = 0.0
        """Since then: seconds with a call under way."""
        self.batch_sum = 0.0
        """Since then: integral of calls over time."""
        self.tokens_sum = 0.0
        """Since then: integral of their contexts over time."""
        self.prefilled = 0.0
        """Since then: prompt tokens that were not cached."""
        self.sampled_here = 0.0
        """Since then: tokens sampled."""
        self.batch_ever = 0.0
        """The same three, since ever."""
        self.tokens_ever = 0.0
        self.prefilled_ever = 0.0
        self.generated = Counter()
        self.missed = Counter()
        self.cached = 0
        self.prefix = 0
        """Since the last reading: prefixes of later turns, and how much of them was cached."""
        self.sampled = 0.0
        self.seconds = 0.0
        self.starts = float("inf")
        """Starts that the forecast allows until the next reading."""
        self.preemptions = Counter()
        self.shed = 0
        self.shed_at = float("-inf")
        self.silent = 0
        self.outside: OutsideView | None = None

    def advance(self, now: float) -> None:
        """Add up the time since the last event, as it was until now."""
        passed = now - self.last
        self.last = now
        if self.calls:
            self.busy_s += passed
        calls, tokens = passed * self.calls, passed * self.tokens
        self.batch_sum += calls
        self.tokens_sum += tokens
        self.batch_ever += calls
        self.tokens_ever += tokens


class PredictiveCap(Admission):
    """One model for each engine; what environments are like is learnt once for all."""

    def __init__(self, bounds: Bounds | None = None, *, risk: float = 1.0) -> None:
        """`risk`: standard deviations of the contexts' sum that the choice allows for."""
        self._bounds = bounds or Bounds()
        self._risk = risk
        self._engines: dict[EngineId, _Engine] = {}
        self._envs: dict[EnvName, EnvStats] = {}
        self._saved: dict[str, Any] = {}

    def __getitem__(self, engine: EngineId) -> _Engine:
        state = self._engines.get(engine)
        if state is None:
            saved = self._saved.get(engine, {})
            state = self._engines[engine] = _Engine(
                saved.get("limit", self._bounds.initial), self._bounds.group
            )
            if "fit" in saved:
                state.fit.restore(saved["fit"])
            if state.limit is not None:
                state.reason = "where it began"
        return state

    # ── what it is told ──

    def joined(self, info: EngineInfo) -> None:
        state = self[info.id]
        state.capacity = None if info.kv_tokens is None else float(info.kv_tokens)
        state.says_capacity = info.kv_tokens is not None
        state.longest = info.max_model_len or self._bounds.longest
        if state.limit is None and state.capacity is not None and state.longest is not None:
            state.limit = self._bounds.clamp(state.capacity // state.longest)
            state.reason = f"{info.kv_tokens} KV tokens, contexts of up to {state.longest}"

    def started(self, engine: Holdings, flight: Flight, now: float) -> None:
        state = self[engine.id]
        state.burst.roll(now)
        state.burst.started()
        state.starts -= 1.0
        if state.even is not None:
            state.credit -= 1.0

    def turn_asked(self, engine: Holdings, flight: Flight, now: float) -> None:
        if flight.continues:
            return
        env = self._envs.get(flight.task.env)
        if env is None:
            env = self._envs[flight.task.env] = EnvStats()
        env.waiting.pop(flight.id, None)
        # What one that goes on after a restart had at the end of its last call is not known: not all of it is new.
        observed = flight.context - flight.known if flight.known else 0
        env.asked(flight.turns, flight.context, observed, now - flight.waits_since)

    def turn_granted(self, engine: Holdings, flight: Flight, now: float) -> None:
        state = self[engine.id]
        state.advance(now)
        if state.summed_from is None:
            state.summed_from = now
        state.calls, state.tokens = engine.calls, engine.calling_tokens
        # What it should have to prefill, put right when it is known: the calls beside it feel it now.
        flight.cold = flight.kv_version not in (None, engine.held)
        flight.kv_version = engine.held
        expected = flight.context if flight.cold else max(0, flight.context - flight.known)
        flight.marks = (state.batch_ever, state.tokens_ever, state.prefilled_ever, expected)
        state.prefilled_ever += expected

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
        state.advance(now)
        state.calls, state.tokens = engine.calls, engine.calling_tokens
        if state.outside is not None:
            state.outside.segment_ended(sampled, seconds, engine.active, is_busy=is_busy)
        if error is not None:
            state.prefilled_ever -= flight.marks[3]
            return
        prompt = flight.context - sampled
        state.prefilled += max(0, prompt - cached)
        state.prefilled_ever += max(0, prompt - cached) - flight.marks[3]
        # What new weights made useless says nothing of whether the cache is large enough.
        if flight.turns > 1 and not flight.cold:
            state.prefix += prompt
            state.cached += cached
        env = self._envs.get(flight.task.env)
        if env is not None:
            env.sampled(sampled, whole=not flight.continues)
            if not flight.continues:
                env.waiting[flight.id] = now
        passed = now - flight.granted_at
        if passed > 0.0 and sampled:
            batch_sum, tokens_sum, prefilled, _ = flight.marks
            batch = (state.batch_ever - batch_sum) / passed
            tokens = (state.tokens_ever - tokens_sum) / passed + batch * sampled / 2
            state.fit.segment(passed, sampled, batch, tokens, state.prefilled_ever - prefilled)
        state.sampled += sampled
        state.sampled_here += sampled
        state.seconds += now - flight.granted_at

    def ended(self, engine: Holdings, flight: Flight, now: float) -> None:
        state = self[engine.id]
        by_itself = flight.cancelled is None
        state.burst.ended(by_itself=by_itself)
        env = self._envs.get(flight.task.env)
        if env is not None:
            env.waiting.pop(flight.id, None)
        if not by_itself:
            return
        if state.even is None:
            state.starts += 1.0
        if env is not None and flight.turns:
            wait = now - flight.waits_since
            env.finished(flight.turns, flight.first, flight.context, flight.age(now), wait)

    # ── what it makes of it, at each reading ──

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        state = self[engine.id]
        state.advance(now)
        state.burst.roll(now)
        if now < state.read_at + READ_S - 1e-6:
            return
        passed = now - state.read_at if isfinite(state.read_at) else READ_S
        state.read_at = now
        if load is None:
            self._silence(state, engine)
            return
        state.silent, state.outside = 0, None
        preempted = state.preemptions.growth(load.preemptions)
        self._learn_capacity(state, engine, load)
        self._learn_speed(state, load, now)
        for env in self._envs.values():
            env.fade()
        capacity, limit = state.capacity, state.limit
        if capacity is None or limit is None or not self._knows_enough(state):
            self._grow_blindly(state, engine, load)
            return
        profile = self._profile(state, engine, now)
        heavier = msgspec.structs.replace(
            profile, context=profile.context * state.guide, final=profile.final * state.guide
        )
        state.half_call = profile.sampled / 2
        speed = state.fit.solve()
        state.prefill_s = speed.prefill
        yields = solve(heavier, speed, capacity * USABLE, self._bounds.most, self._risk)
        state.limit = limit = self._moved(state, limit, yields, profile, now)
        self._guide(state, engine, load, yields.hits_at(limit), yields.hits_at(engine.active), preempted, now)
        self._look_ahead(state, engine, profile, limit, capacity, passed, now)
        state.cached = state.prefix = 0

    def _learn_capacity(self, state: _Engine, engine: Holdings, load: EngineLoad) -> None:
        """An engine that does not say how much it holds: what runs, over the share it says that takes."""
        if state.says_capacity or load.kv_usage < 0.05 or not engine.calling_tokens:
            return
        growing = sum(env.per_turn for env in self._envs.values()) / max(1, len(self._envs)) / 2
        guess = (engine.calling_tokens + engine.calls * growing) / load.kv_usage
        known = state.capacity
        state.capacity = guess if known is None else known + 0.1 * (guess - known)

    def _learn_speed(self, state: _Engine, load: EngineLoad, now: float) -> None:
        """A window from what the engine counted since the last reading, or else from what was seen of it."""
        generated = state.generated.growth(load.generated_tokens)
        missed = state.missed.growth(load.prefix_queries - load.prefix_hits)
        if not load.generated_tokens:
            generated = int(state.sampled_here)
        if not load.prefix_queries:
            missed = int(state.prefilled)
        busy = state.busy_s
        since, state.summed_from = state.summed_from, now
        if since is not None and now > since:
            calls = state.batch_sum / (now - since)
            state.pinned += (1.0 - exp((since - now) / PINNED_S)) * (calls - state.pinned)
        if busy > 0.0 and generated > 0:
            batch = state.batch_sum / busy
            tokens = state.tokens_sum / busy + batch * state.half_call
            state.fit.window(busy, generated / batch, batch, tokens, missed)
        state.busy_s = state.batch_sum = state.tokens_sum = state.prefilled = state.sampled_here = 0.0

    def _knows_enough(self, state: _Engine) -> bool:
        turns = sum(env.seen for env in self._envs.values())
        ended = sum(env.ended for env in self._envs.values())
        return state.fit.windows >= ENOUGH_WINDOWS and (turns >= ENOUGH_TURNS or ended >= ENOUGH_TURNS / 4)

    def _grow_blindly(self, state: _Engine, engine: Holdings, load: EngineLoad) -> None:
        """Before there is a model: up to what fits at the longest context, and no further."""
        if state.limit is None:
            state.limit = self._bounds.clamp(1.0)
        if state.capacity is not None and state.longest is not None:
            fits = state.capacity / state.longest
            # Its rollouts may be waiting for slow tools, and tell nothing more for minutes.
            held = engine.working_tokens / max(1, engine.active)
            light = LIGHT * state.capacity / held if held else 0.0
            if engine.active >= 0.9 * state.limit and load.kv_usage < 0.5 and not load.waiting:
                state.limit = self._bounds.clamp(
                    max(state.limit, min(max(fits, light), state.limit * 1.25 + 1.0))
                )
        state.reason = "too little is known yet: as many as fit at their longest, or at thrice what they hold"

    def _profile(self, state: _Engine, engine: Holdings, now: float) -> Profile:
        """Of the mix of environments that the engine holds."""
        longest = float(state.longest or 1 << 20)
        if len(self._envs) == 1:
            return next(iter(self._envs.values())).profile(longest, now)
        counts: dict[EnvName, int] = {}
        for flight in engine.flights.values():
            counts[flight.task.env] = counts.get(flight.task.env, 0) + 1
        known = [
            (env.profile(longest, now), counts.get(name, 0) + 0.1)
            for name, env in self._envs.items()
            if env.seen
        ]
        return _mixed(known)

    def _moved(self, state: _Engine, limit: float, yields: Yield, profile: Profile, now: float) -> float:
        """The limit, a step nearer to what yields most."""
        best = float(yields.best)
        passed, state.moved_at = now - state.moved_at, now
        if state.settled:
            limit += (best - limit) * (1.0 - exp(-max(0.0, passed) / SMOOTH_S))
        else:
            limit, state.settled = best, True
        state.reason = (
            f"yields most with {yields.best}: contexts of {profile.context:.0f} tokens, "
            f"hit rate {yields.hits_at(best):.0%}"
        )
        return self._bounds.clamp(limit)

    def _guide(
        self,
        state: _Engine,
        engine: Holdings,
        load: EngineLoad,
        at_limit: float,
        expected: float,
        preempted: int,
        now: float,
    ) -> None:
        """Compare the hit rate with what was `expected` of so many rollouts; take some off when it has collapsed, far
        below what there would be `at_limit`."""
        if state.prefix <= 0:
            return
        seen, cacheable = state.cached / state.prefix, self._cacheable()
        low, high = GUIDE_BOUNDS
        wrong = expected * cacheable - seen
        state.guide = min(high, max(low, state.guide ** (1.0 - FORGET) * exp(GUIDE * wrong)))
        thrashes = seen < at_limit * cacheable - THRASH or preempted or load.waiting
        excess = engine.active - self.cap(engine.id)
        if excess > max(1, engine.active // 20) and thrashes and now >= state.shed_at + SHED_EVERY_S:
            state.shed, state.shed_at = excess, now

    def _cacheable(self) -> float:
        """Share of a later turn's prompt that was there before: the most that can be cached."""
        prompts = sum(env.prompt_tokens for env in self._envs.values())
        return 1.0 - sum(env.new_tokens for env in self._envs.values()) / prompts if prompts else 1.0

    def _look_ahead(
        self,
        state: _Engine,
        engine: Holdings,
        profile: Profile,
        limit: float,
        capacity: float,
        passed: float,
        now: float,
    ) -> None:
        """How many may start until the next reading, going by the rollouts that are really there; readings come every `passed`
        seconds."""
        flights = [f for f in engine.flights.values() if not f.parked]
        pace = state.sampled / state.seconds if state.seconds else 0.0
        contexts = np.array([f.context + (now - f.granted_at) * pace * f.calling for f in flights])
        ages = np.array([f.age(now) for f in flights])
        durations = [seconds for env in self._envs.values() for seconds in env.durations]
        growth = sum(env.growth for env in self._envs.values()) / len(self._envs)
        if growth <= 0.0 and len(ages) and ages.sum() > 0:
            growth = float((contexts - profile.first).clip(0.0).sum() / ages.sum())
        mean = sum(durations) / len(durations) if durations else HORIZON_S / 2
        pinned = state.pinned / max(1, len(flights))
        most = PINNED * capacity / max(pinned, 1e-3)
        steady = limit * (profile.context + profile.sampled / 2)
        swing = SWING * sqrt(limit) * sqrt(profile.sd**2 + profile.sampled_sq / 12)
        state.starts = state.forecast.room_for(
            ages,
            contexts,
            Survival(durations, ages),
            growth=growth,
            first=profile.first,
            horizon_s=min(HORIZON_S, mean),
            bound=min(steady + swing, most),
            now=now,
        )
        self._pace(state, durations, min(limit, limit * most / steady), passed)
        state.sampled *= 0.9
        state.seconds *= 0.9

    def _pace(self, state: _Engine, durations: list[float], most: float, passed: float) -> None:
        """Rollouts that all last equally long would go through the cache in waves for ever, as they were started: then
        they start evenly spread, as many in a lifetime as the engine holds, `most`. The forecast would say go and stop."""
        state.even = None
        if len(durations) < 8:
            return
        mean = sum(durations) / len(durations)
        spread = sqrt(sum((d - mean) ** 2 for d in durations) / len(durations)) / mean
        if spread < REGULAR:
            state.even = most
            a_reading = passed * most / mean
            state.credit = min(state.credit + a_reading * (1.0 + spread), 2.0 * a_reading + 1.0)
            state.starts = state.credit

    def _silence(self, state: _Engine, engine: Holdings) -> None:
        """A reading did not come: that frees nothing."""
        state.starts = min(state.starts, 0.0)
        state.silent += 1
        if state.silent < SILENT_READINGS:
            return
        if state.outside is None:
            state.outside = OutsideView(self._bounds.clamp(state.limit or 1.0))
        state.starts = float("inf")
        state.limit = self._bounds.clamp(state.outside.cap)
        state.outside.cap = state.limit
        state.reason = state.outside.reason

    # ── what it answers ──

    def cap(self, engine: EngineId) -> int:
        state = self[engine]
        if state.limit is None:
            return max(1, self._bounds.floor)
        if state.even is not None:
            limit = state.even
        elif state.settled and state.outside is None:
            limit = state.limit * STRETCH
        else:
            limit = state.limit
        return max(1, round(self._bounds.clamp(limit)))

    def room(self, engine: EngineId, active: int) -> int:
        state = self[engine]
        cap = self.cap(engine)
        room = min(cap - active, state.burst.left(cap))
        # One rollout may always run, whatever the forecast.
        return room if room <= state.starts else max(int(state.starts), 1 - active)

    def turn_tokens(self, engine: EngineId) -> int | None:
        state = self[engine]
        if state.capacity is None or not self._envs or state.outside is not None:
            return None
        return int(state.capacity * USABLE - state.calls * state.half_call)

    def prefill_s(self, engine: EngineId) -> float | None:
        state = self[engine]
        return state.prefill_s if state.settled and state.outside is None else None

    def to_park(self, engine: EngineId, active: int) -> int:
        state = self[engine]
        shed, state.shed = state.shed, 0
        return min(shed, active - 1)

    def reason(self, engine: EngineId) -> str:
        return self[engine].reason

    def snapshot(self) -> dict[str, Any]:
        return {
            "type": "predictive",
            "engines": {
                name: {"limit": state.limit, "fit": state.fit.snapshot()}
                for name, state in self._engines.items()
                if state.limit is not None
            },
            "envs": {name: env.snapshot() for name, env in self._envs.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("type") == "predictive":
            self._saved = dict(state["engines"])
            for name, saved in state["envs"].items():
                self._envs[name] = EnvStats()
                self._envs[name].restore(saved)


def _mixed(known: list[tuple[Profile, float]]) -> Profile:
    """One profile for several environments. A turn's means are weighted by turns; rollouts in flight tell how many
    each environment has, for as long as a turn of theirs takes."""
    total = sum(weight for _, weight in known)
    shares = [(profile, weight / total) for profile, weight in known]

    def mean(name: str) -> float:
        return float(sum(getattr(profile, name) * share for profile, share in shares))

    context = mean("context")
    second = sum((p.sd**2 + p.context**2) * share for p, share in shares)
    return Profile(
        turns=1.0 / sum(share / p.turns for p, share in shares),
        first=mean("first"),
        final=mean("final"),
        context=context,
        sd=sqrt(max(0.0, second - context**2)),
        sampled=mean("sampled"),
        sampled_sq=mean("sampled_sq"),
        observed=mean("observed"),
        outside_s=mean("outside_s"),
        waits=np.sort(
            np.concatenate([p.waits[:: max(1, round(1 / max(share, 0.01)))] for p, share in shares])
        ),
    )
