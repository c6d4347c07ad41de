"""A model of one inference engine in virtual time: what a batch, its contexts and a prefix cache do to speed.

It is event-driven: between two events the batch is constant, and n steps take n·F + κ(nK + B·n(n+1)/2) seconds for B
sequences with K tokens of context, F being all of a step that is not reading the KV cache. So its cost does not depend
on how many tokens are sampled.

What it has of vLLM: first come, first served with a waiting line; a call enters when its context fits; contexts that
are not running stay cached, least recently used go first, tail first; `kv_usage` does not count them; when the cache
is full the last call to enter is preempted, loses its KV and goes to the front of the line.

What it leaves out: chunked prefill (here a prefill stalls the decode, for the same time in all), rounding to blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, sqrt

from paceline.domain.load import EngineLoad

BLOCK = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast a model runs on a GPU. The default is an 8B model in bf16 on one H100: a roofline with efficiencies
    that fit published measurements (weights at 86% of the memory bandwidth, KV at 60%, 70% of peak compute)."""

    kv_tokens: int = 380_000
    """Capacity of the KV cache."""
    max_model_len: int = 32_768
    max_num_seqs: int = 256
    weights_s: float = 5.3e-3
    """To read the weights once: what a step takes at least."""
    overhead_s: float = 1.0e-3
    """Launches and scheduling of a step."""
    seq_s: float = 3e-6
    """Scheduling and sampling of one sequence in a step."""
    token_s: float = 23.7e-6
    """Compute of one token, sampled or prefilled."""
    kv_s: float = 73e-9
    """To read the KV of one token of context."""
    attention_s: float = 1.3e-9
    """Compute of prefilling one token against one token of context."""

    def step_s(self, batch: int) -> float:
        """A step of decode, without reading the KV cache. The roofline's corner is rounded off with a 4-norm."""
        gemm = float((self.weights_s**4 + (batch * self.token_s) ** 4) ** 0.25)
        return gemm + self.overhead_s + batch * self.seq_s

    def prefill_s(self, cached: int, new: int) -> float:
        """To prefill `new` tokens behind `cached` ones."""
        gemm = float((self.weights_s**4 + (new * self.token_s) ** 4) ** 0.25)
        return gemm + self.overhead_s + new * (cached + new / 2) * self.attention_s


class ModelCall:
    """One request."""

    __slots__ = ("cached", "context", "finish_at", "key", "left", "sampled", "shared", "started")

    def __init__(self, key: Hashable, context: int, tokens: int, shared: Hashable, started: float) -> None:
        self.key = key
        self.context = context
        self.left = tokens
        self.shared = shared
        self.started = started
        self.sampled = 0
        self.cached = 0
        self.finish_at = 0.0
        """Step count of the engine at which it is done."""


class EngineModel:
    """One engine. `advance` it to the time of every event around it; it then returns the calls that have finished."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self.now = 0.0
        self.preemptions = 0
        self.generated = 0.0
        self.queries = 0
        self.hits = 0
        self.busy_s = 0.0
        """Seconds with at least one call."""
        self._steps = 0.0
        self._decoding: dict[Hashable, ModelCall] = {}
        self._finishes: list[tuple[float, int, ModelCall]] = []
        self._order = 0
        self._prefilling: ModelCall | None = None
        self._prefilled_at = inf
        self._waiting: deque[ModelCall] = deque()
        self._tokens = 0.0
        """Contexts of the calls that run, in tokens."""
        self._cache: OrderedDict[Hashable, int] = OrderedDict()
        self._cached = 0
        self._done: list[ModelCall] = []

    # ── what a client does ──

    def submit(self, key: Hashable, context: int, tokens: int, now: float, shared: Hashable = None) -> None:
        """Send a request: `context` tokens of the conversation `key`, and sample `tokens`. The first tokens of
        conversations with the same `shared` are the same."""
        self._run_to(now)
        self._waiting.append(ModelCall(key, context, tokens, shared, now))
        self._admit()

    def abort(self, key: Hashable, now: float) -> ModelCall | None:
        """Stop a request; None if it is not there, or finished at this very moment."""
        self._run_to(now)
        for waiting in self._waiting:
            if waiting.key == key:
                self._waiting.remove(waiting)
                return waiting
        if self._prefilling is not None and self._prefilling.key == key:
            call = self._prefilling
            self._prefilling, self._prefilled_at = None, inf
            self._leave(call, keep=0)
        elif key in self._decoding:
            call = self._decoding.pop(key)
            self._finishes = [f for f in self._finishes if f[2] is not call]
            heapify(self._finishes)
            self._settle(call)
            self._leave(call, keep=call.context)
        else:
            return None
        self._admit()
        return call

    def advance(self, now: float) -> list[ModelCall]:
        """Go on to `now`; the calls that have finished since the last time."""
        self._run_to(now)
        done, self._done = self._done, []
        return done

    def next_at(self) -> float:
        """When something will happen next, if nothing comes from outside."""
        if self._done:
            return self.now
        if self._prefilling is not None:
            return self._prefilled_at
        if not self._decoding:
            return inf
        return self.now + self._seconds(self._steps_to_event())

    def forget(self, key: Hashable) -> None:
        """Nobody told a real engine that a conversation has ended, so this is for tests only."""
        self._cached -= self._cache.pop(key, 0)

    def load(self) -> EngineLoad:
        """What it says of itself."""
        return EngineLoad(
            running=len(self._decoding) + (self._prefilling is not None),
            waiting=len(self._waiting),
            kv_usage=min(1.0, self._tokens / self.speed.kv_tokens),
            preemptions=self.preemptions,
            prefix_queries=self.queries,
            prefix_hits=self.hits,
            generated_tokens=round(self.generated),
        )

    # ── time ──

    def _run_to(self, now: float) -> None:
        while self.now < now:
            if self._prefilling is not None:
                if self._prefilled_at > now:
                    self.busy_s += now - self.now
                    break
                self.busy_s += self._prefilled_at - self.now
                self.now = self._prefilled_at
                self._end_prefill()
            elif self._decoding:
                steps = self._steps_to_event()
                seconds = self._seconds(steps)
                if self.now + seconds > now:
                    self._decode(self._steps_in(now - self.now))
                    self.busy_s += now - self.now
                    break
                self.now += seconds
                self.busy_s += seconds
                self._decode(steps)
                self._end_steps()
            else:
                break
            self._admit()
        self.now = now
        while self._decoding and self._finishes[0][0] <= self._steps + 1e-9:
            self._end_steps()
            self._admit()

    def _decode(self, steps: float) -> None:
        self._steps += steps
        self._tokens += steps * len(self._decoding)
        self.generated += steps * len(self._decoding)

    def _seconds(self, steps: float) -> float:
        batch = len(self._decoding)
        kv = self.speed.kv_s
        return steps * self.speed.step_s(batch) + kv * (
            steps * self._tokens + batch * steps * (steps + 1) / 2
        )

    def _steps_in(self, seconds: float) -> float:
        batch = len(self._decoding)
        a = self.speed.kv_s * batch / 2
        b = self.speed.step_s(batch) + self.speed.kv_s * self._tokens + a
        return (sqrt(b * b + 4 * a * seconds) - b) / (2 * a)

    def _steps_to_event(self) -> float:
        finish = self._finishes[0][0] - self._steps
        full = (self.speed.kv_tokens - self._tokens) / len(self._decoding)
        return max(0.0, min(finish, full))

    # ── what happens ──

    def _admit(self) -> None:
        """Let the first of the line in, if nothing is being prefilled and its context fits."""
        speed = self.speed
        while self._waiting and self._prefilling is None:
            call = self._waiting[0]
            running = len(self._decoding)
            # A block more for each: one that was preempted must not come straight back and fill the cache again.
            needed = self._tokens + call.context + BLOCK * (running + 1)
            if running and (running >= speed.max_num_seqs or needed > speed.kv_tokens):
                return
            self._waiting.popleft()
            own = self._cache.pop(call.key, 0)
            self._cached -= own
            call.cached = min(own, call.context - 1)
            if not call.cached and call.shared is not None and call.shared in self._cache:
                call.cached = min(self._cache[call.shared], call.context - 1)
                self._cache.move_to_end(call.shared)
            self.queries += call.context
            self.hits += call.cached
            self._tokens += call.context
            self._evict()
            self._prefilling = call
            self._prefilled_at = self.now + speed.prefill_s(call.cached, call.context - call.cached)

    def _end_prefill(self) -> None:
        call, self._prefilling, self._prefilled_at = self._prefilling, None, inf
        assert call is not None
        if call.shared is not None and not call.sampled and call.shared not in self._cache:
            self._cache[call.shared] = call.context
            self._cached += call.context
        call.finish_at = self._steps + call.left
        self._decoding[call.key] = call
        self._order += 1
        heappush(self._finishes, (call.finish_at, self._order, call))

    def _end_steps(self) -> None:
        if self._finishes[0][0] <= self._steps + 1e-9:
            call = heappop(self._finishes)[2]
            del self._decoding[call.key]
            self._settle(call)
            self._leave(call, keep=call.context)
            self._done.append(call)
        elif self._tokens >= self.speed.kv_tokens - 1e-6 and len(self._decoding) > 1:
            self._evict()
            call = self._decoding.pop(next(reversed(self._decoding)))
            self._finishes = [f for f in self._finishes if f[2] is not call]
            heapify(self._finishes)
            self._settle(call)
            self._leave(call, keep=0)
            self.preemptions += 1
            self._waiting.appendleft(call)

    def _settle(self, call: ModelCall) -> None:
        sampled = min(call.left, max(0, round(call.left - (call.finish_at - self._steps))))
        call.left -= sampled
        call.sampled += sampled
        call.context += sampled

    def _leave(self, call: ModelCall, keep: int) -> None:
        """It runs no more; `keep` tokens of it stay cached until others need the room."""
        self._tokens = max(0.0, self._tokens - call.context)
        if not self._decoding and self._prefilling is None:
            self._tokens = 0.0
        if keep:
            self._cache[call.key] = keep
            self._cached += keep
        self._evict()

    def _evict(self) -> None:
        over = self._tokens + self._cached - self.speed.kv_tokens
        while over > 0 and self._cache:
            key, held = next(iter(self._cache.items()))
            if held > over:
                self._cache[key] = held - int(over) - 1
                self._cached -= int(over) + 1
                return
            del self._cache[key]
            self._cached -= held
            over -= held
