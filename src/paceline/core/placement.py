"""Where the members of a group go: after the first, until its engine is full; then by what is cheaper.

The members of a group share their prompt, and an engine prefills it once for all of them. When the engine of the first
has no permit left, the next member can wait for one, or go to an engine that has one and prefill the prompt anew:

    wait here       seconds until a permit comes back: the mean gap between endings there, and no less than the time
                    since the last of them, so that an engine where nothing ends is not waited for
    prefill there   tokens of the environment's first prompt, times seconds an uncached prompt token takes there: as
                    the admission controller learnt it (`predictive`), else the fastest first call that was not cached,
                    its decoding included, which is the most that a prefill can cost

It goes elsewhere when that costs no more than waiting, and where one of the two is not known yet. While it waits, the
permits that are free take other groups, so nothing stands idle for it as long as there are any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from paceline.domain.ids import EngineId, EnvName

KEEP: Final = 0.9
"""Weight of what was known before, at each new observation."""
ENOUGH: Final = 4
"""Endings, and first calls, after which what they say is believed."""
FORGET: Final = 1.003
"""The fastest call seen counts this much slower with each that follows, so that one lucky call does not rule for ever."""


class _Engine:
    """What is known of one engine: when permits come back, and what a prefill costs at most."""

    __slots__ = ("calls", "freed", "freed_at", "gap_s", "token_s")

    def __init__(self, now: float) -> None:
        self.freed = 0
        self.freed_at = now
        self.gap_s = 0.0
        self.calls = 0
        self.token_s = inf


class Placement:
    """Learns the two costs from what happens; pure, and at a constant cost for each event."""

    __slots__ = ("_engines", "_prompts", "_saved", "_slowest", "_sure")

    def __init__(self) -> None:
        self._engines: OrderedDict[EngineId, _Engine] = OrderedDict()
        """The one first that has freed no permit for longest."""
        self._sure = 0
        """Engines on which enough has ended to believe the gap between endings."""
        self._slowest: _Engine | None = None
        """The one of them with the longest gap."""
        self._saved: dict[EngineId, tuple[int, float]] = {}
        """Of an earlier life: first calls of each engine, and seconds a token."""
        self._prompts: dict[EnvName, float] = {}
        """Tokens of a first prompt, on the mean."""

    # ── what it is told ──

    def asked(self, env: EnvName, prompt: int) -> None:
        """A rollout asked for its first call."""
        known = self._prompts.get(env)
        self._prompts[env] = float(prompt) if known is None else KEEP * known + (1.0 - KEEP) * prompt

    def answered(self, engine: EngineId, prompt: int, cached: int, seconds: float, now: float) -> None:
        """A first call came back: prompt tokens, those of them that were cached, and seconds it took."""
        uncached = prompt - cached
        if 2 * uncached <= prompt:
            return  # mostly cached: it says little of a prefill
        state = self._of(engine, now)
        state.calls += 1
        state.token_s = min(state.token_s * FORGET, seconds / uncached)

    def freed(self, engine: EngineId, now: float) -> None:
        """A rollout on it has ended, and its permit is free."""
        state = self._of(engine, now)
        gap = now - state.freed_at
        state.freed += 1
        state.freed_at = now
        state.gap_s = gap if state.freed == 1 else KEEP * state.gap_s + (1.0 - KEEP) * gap
        self._engines.move_to_end(engine)
        if state.freed < ENOUGH:
            return
        self._sure += state.freed == ENOUGH
        slowest = self._slowest
        if slowest is state:
            sure = [each for each in self._engines.values() if each.freed >= ENOUGH]
            self._slowest = max(sure, key=lambda each: each.gap_s)
        elif slowest is None or state.gap_s > slowest.gap_s:
            self._slowest = state

    # ── what it answers ──

    def prefill_s(self, engine: EngineId, env: EnvName, token_s: float | None = None) -> float | None:
        """Seconds to prefill a first prompt of `env` there; None where too little is known. `token_s`: what somebody
        who knows better says that one token takes."""
        prompt = self._prompts.get(env)
        if token_s is None:
            state = self._engines.get(engine)
            calls, seconds = (
                self._saved.get(engine, (0, inf)) if state is None else (state.calls, state.token_s)
            )
            token_s = seconds if calls >= ENOUGH else None
        return None if token_s is None or prompt is None else token_s * prompt

    def frees_within(self, engine: EngineId, seconds: float, now: float) -> bool:
        """Whether a full engine will have a permit again in less than so many seconds; False where too few have ended to
        say. Asked for every group that waits, at every start."""
        state = self._engines.get(engine)
        if state is None or state.freed < ENOUGH:
            return False
        return state.gap_s < seconds and now - state.freed_at < seconds

    def all_free_within(self, engines: int, seconds: float, now: float) -> bool:
        """Whether `frees_within` holds for each of so many engines, which are all that there are; at a constant cost. With
        many engines nearly every start is one that this answers."""
        slowest = self._slowest
        if slowest is None or self._sure < engines:
            return False
        return slowest.gap_s < seconds and now - next(iter(self._engines.values())).freed_at < seconds

    # ── resuming ──

    def snapshot(self) -> dict[str, Any]:
        """What `restore` takes back; msgpack-able. How often permits come back is learnt anew: nothing ended meanwhile."""
        known = {
            name: (engine.calls, engine.token_s) for name, engine in self._engines.items() if engine.calls
        }
        return {"engines": {**self._saved, **known}, "prompts": dict(self._prompts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what prefills were seen to cost."""
        self._saved = {name: (int(calls), float(s)) for name, (calls, s) in state.get("engines", {}).items()}
        self._prompts = {name: float(tokens) for name, tokens in state.get("prompts", {}).items()}

    def _of(self, engine: EngineId, now: float) -> _Engine:
        state = self._engines.get(engine)
        if state is None:
            state = self._engines[engine] = _Engine(now)
            state.calls, state.token_s = self._saved.get(engine, (0, inf))
        return state
