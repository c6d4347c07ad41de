"""The engine: queue, admission, chunked prefill, preemption and new weights, as vLLM (V1) does them.

    waiting ─▶ admitted when its blocks fit ─▶ prefill, in chunks ─▶ decode ─▶ done
       ▲                                            │
       └──────────── preempted: the last to enter ◀─┘  the cache is full

Time goes on in stretches of whole steps whose batch is constant: one step when something is prefilled, any number when
all decode (see `speed`). `next_at` says when the stretch in hand ends; whoever drives the engine calls `run` then.
What comes in the middle of a step is looked at when the step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from math import inf, sqrt

from paceline.domain.ids import Version
from paceline.domain.load import EngineLoad
from paceline.errors import InvariantError
from paceline.sim.engine.cache import PrefixCache
from paceline.sim.engine.calls import Call, Totals
from paceline.sim.engine.speculation import Drafter
from paceline.sim.engine.speed import Speed

__all__ = ["Call", "EngineModel", "Totals"]

_WAITS, _PREFILLS, _DECODES, _GONE = 0, 1, 2, 3


class EngineModel:
    """One engine."""

    def __init__(self, speed: Speed, version: Version = 0) -> None:
        self.speed = speed
        self.version = version
        self.totals = Totals()
        self._decode_s: list[float] = []
        """By batch: a step of decode, without reading the KV."""
        self._blocks = max(1, speed.kv_tokens // speed.block)
        self._drafter = None if speed.speculation is None else Drafter(speed.speculation, speed)
        self._spares = 0.0 if speed.pads else 1.0 - speed.kv_again
        """Share of its cost that a token of context spares which another call of the step has read; then readers are counted."""
        self._reset()

    def _reset(self) -> None:
        speed = self.speed
        self.next_at = inf
        """When `run` has something to do, if nothing comes from outside; inf: never."""
        self.is_still = False
        """Whether it stands still for new weights."""
        self._stopping = False
        self._draining = False
        """Whether it stops only when nothing runs any more."""
        self._cache = PrefixCache()
        self._waiting: deque[Call] = deque()
        self._dead_waiting = 0
        """Calls in the line that were aborted there."""
        self._running: dict[Hashable, Call] = {}
        """In order of entry: the last is preempted first."""
        self._prefilling: list[Call] = []
        self._chunks: list[tuple[Call, int]] = []
        """What the step in hand prefills; empty in a stretch of decode."""
        self._finishes: list[tuple[int, int, Call]] = []
        self._leaving: list[Call] = []
        """Aborted calls that the step in hand still carries."""
        self._done: list[Call] = []
        self._entries = 0
        self._steps = 0
        self._batch = 0
        """Calls that decode."""
        self._context = 0
        """Their contexts, in tokens."""
        self._readers: dict[Hashable, int] = {}
        """How many of them have each shared segment."""
        self._again = 0
        """Tokens of their contexts that another of them has as well, each but once: the same blocks."""
        self._decode_blocks = 0
        """Blocks of their own that decoding calls hold now."""
        self._phases = [0] * speed.block
        """How many of them have which remainder of `alignment`: those that need a block in the same step."""
        self._prefill_blocks = 0
        self._since = 0.0
        self._planned = 0
        """Steps of the stretch in hand; 0 when idle."""
        self._step_s = 0.0
        """A step of the stretch, without reading the KV of decoding calls."""
        self._kv_s = speed.kv_s
        """To read one token of their contexts in it."""
        self._read = 0.0
        """Tokens that its first step reads, without those it samples; what is read again counts by what it costs."""
        self._pass_tokens = 1.0
        """Steps of the stretch that one pass of the model makes; more than one where it speculates."""
        self._likely = 0
        """Sum over them of how likely a draft is right."""

    # ── what a client does ──

    def submit(self, call: Call, now: float) -> None:
        """Send a request."""
        call.started = now
        call.running = _WAITS
        if self._drafter is not None:
            call.likely = self._drafter.likelihood(call.references)
        self.totals.events += 1
        waiting = self._waiting
        waiting.append(call)
        if self.is_still:
            return
        if not self._planned:
            self._schedule(now)
        elif len(waiting) == 1 and self._planned > 1:
            self._cut(now)

    def abort(self, call: Call, now: float) -> None:
        """Stop a request. `call.sampled` is then what it had, and its reply may be given at once."""
        state = call.running
        if state < _WAITS:
            return
        if state == _WAITS:
            self._dead_waiting += 1
        elif state == _DECODES:
            call.sampled = call.joined_sampled + self._steps + self._done_steps(now) - call.joined_step
        elif state == _GONE:
            raise InvariantError(f"call {call.key} has left its engine already")
        call.running = _GONE
        if state == _WAITS:
            return
        self._leaving.append(call)
        if not self._planned:
            self._let_go()
            if not self.is_still:
                self._schedule(now)
        elif self._planned > 1:
            self._cut(now)

    def run(self, now: float) -> list[Call]:
        """Go on to `now`; the calls that have finished."""
        while self.next_at <= now:
            self._end_stretch(self.next_at)
        done, self._done = self._done, []
        return done

    def load(self, now: float) -> EngineLoad:
        """What it says of itself."""
        totals = self.totals
        steps = self._done_steps(now)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting) - self._dead_waiting,
            kv_usage=min(1.0, (self._held + self._growth(steps)) / self._blocks),
            preemptions=totals.preemptions,
            prefix_queries=totals.queries,
            prefix_hits=totals.hits,
            generated_tokens=totals.generated + steps * self._batch,
        )

    def busy_until(self, now: float) -> tuple[float, float]:
        """Seconds of computing and blocks times seconds, the stretch in hand included."""
        totals = self.totals
        if not self._planned:
            return totals.busy_s, totals.kv_area
        part = max(0.0, min(now, self.next_at) - self._since)
        return totals.busy_s + part, totals.kv_area + part * self._held

    @property
    def calls(self) -> int:
        """Requests that wait or run."""
        return len(self._running) + len(self._waiting) - self._dead_waiting

    # ── weights, and the end ──

    def stop(self, now: float, *, drain: bool = False) -> None:
        """Stand still at the end of the step in hand, or with `drain` when nothing runs any more; see `is_still`."""
        self._stopping, self._draining = True, drain
        if not self._planned:
            self._stand_still()
        elif self._planned > 1 and not drain:
            self._cut(now)

    def go_on(self, now: float, version: Version | None = None, *, recompute: bool = False) -> None:
        """Sample again, with `version` if it is given; with `recompute` all KV is dropped first."""
        if version is not None and version != self.version:
            for call in self._running.values():
                self._mark(call)
            for call in self._waiting:
                if call.sampled:
                    self._mark(call)
            self.version = version
        if recompute:
            for call in reversed(self._running.copy().values()):
                self._send_back(call, keep=False)
            self._cache.clear()
        self._stopping = self.is_still = False
        self._schedule(now)

    def kill(self) -> list[Call]:
        """It is gone, with all it held; the calls it had, with what they had sampled by the end of the last stretch."""
        calls = [call for call in (*self._running.values(), *self._waiting) if call.running != _GONE]
        for call in calls:
            if call.running == _DECODES:
                call.sampled = call.joined_sampled + self._steps - call.joined_step
            call.running = _GONE
        self._reset()
        return calls

    def _mark(self, call: Call) -> None:
        sampled = call.sampled
        if call.running == _DECODES:
            sampled = call.joined_sampled + self._steps - call.joined_step
        if call.marks is None:
            call.marks = []
        call.marks.append((self.version, sampled))

    def _stand_still(self) -> None:
        self.is_still = True
        self._planned = 0
        self.next_at = inf

    # ── a stretch ──

    def _seconds(self, steps: int) -> float:
        kv = self._kv_s
        return steps * self._step_s + kv * (steps * self._read + self._batch * (steps * (steps + 1) // 2))

    def _done_steps(self, now: float) -> int:
        """Whole steps of the stretch in hand that are over at `now`."""
        if self._planned <= 1 or now >= self.next_at:
            return 0 if self._planned <= 1 else self._planned
        elapsed = now - self._since
        if elapsed <= 0.0:
            return 0
        a = self._kv_s * self._batch / 2
        b = self._step_s + self._kv_s * self._read + a
        return min(self._planned - 1, int(2 * elapsed / (b + sqrt(b * b + 4 * a * elapsed)) + 1e-9))

    def _cut(self, now: float) -> None:
        """End the stretch with the step that is under way."""
        steps = self._done_steps(now) + 1
        if steps < self._planned:
            self._planned = steps
            self.next_at = self._since + self._seconds(steps)

    def _end_stretch(self, now: float) -> None:
        steps, batch, totals = self._planned, self._batch, self.totals
        took = now - self._since
        # Nearly every second stretch is one step: a prefill, or what was cut for one.
        growth = self._growth(steps) if steps > 1 else self._phases[-self._steps % self.speed.block]
        held = self._decode_blocks + self._prefill_blocks + self._cache.shared_blocks
        totals.kv_area += took * (held + growth / 2)
        self._decode_blocks += growth
        self._steps += steps
        self._context += steps * batch
        totals.busy_s += took
        totals.generated += steps * batch
        totals.steps += steps
        totals.passes += steps / self._pass_tokens
        totals.events += 1
        if self._chunks:
            self._end_prefills()
        if self._leaving:
            self._let_go()
        finishes, done = self._finishes, self._steps
        while finishes and finishes[0][0] <= done:
            _, entry, call = heappop(finishes)
            if call.entry == entry and call.running == _DECODES:
                self._finish(call)
        if self._stopping and not (self._draining and self._running):
            self._stand_still()
        else:
            self._schedule(now)

    def _end_prefills(self) -> None:
        for call, tokens in self._chunks:
            call.missing -= tokens
            self.totals.prefilled += tokens
            if call.missing or call.running != _PREFILLS:
                continue
            # The step that computes the end of the prompt samples the first token behind it.
            self._prefilling.remove(call)
            call.sampled += 1
            self.totals.generated += 1
            self._prefill_blocks -= self._own_blocks(call, call.sampled - 1)
            self._join(call)
        self._chunks = []

    def _join(self, call: Call) -> None:
        steps = self._steps
        call.running = _DECODES
        call.joined_step, call.joined_sampled = steps, call.sampled
        call.finish_step = steps + call.target - call.sampled
        context = call.prompt + call.sampled
        call.alignment = context - call.shared_tokens - steps
        self._decode_blocks += -(-(context - call.shared_tokens) // self.speed.block)
        self._phases[call.alignment % self.speed.block] += 1
        self._batch += 1
        self._context += context
        self._likely += call.likely
        if self._spares:
            self._reads_shared(call)
        heappush(self._finishes, (call.finish_step, call.entry, call))

    def _unjoin(self, call: Call) -> None:
        call.sampled = call.joined_sampled + self._steps - call.joined_step
        block = self.speed.block
        self._decode_blocks -= -(-(call.alignment + self._steps) // block)
        self._phases[call.alignment % block] -= 1
        self._batch -= 1
        self._context -= call.prompt + call.sampled
        self._likely -= call.likely
        if self._spares:
            self._reads_no_more(call)

    def _reads_shared(self, call: Call) -> None:
        readers, block = self._readers, self.speed.block
        for key, blocks in call.chain:
            others = readers.get(key, 0)
            readers[key] = others + 1
            if others:
                self._again += blocks * block

    def _reads_no_more(self, call: Call) -> None:
        readers, block = self._readers, self.speed.block
        for key, blocks in call.chain:
            others = readers.pop(key) - 1
            if others:
                readers[key] = others
                self._again -= blocks * block

    def _finish(self, call: Call) -> None:
        del self._running[call.key]
        self.totals.events += 1
        self._unjoin(call)
        call.running = _GONE
        kept = (call.prompt + call.sampled - call.shared_tokens) // self.speed.block
        self._cache.release(call.chain, call.own, kept)
        self._done.append(call)

    def _let_go(self) -> None:
        """Take aborted calls out of the batch; what they computed stays in the cache."""
        for call in self._leaving:
            del self._running[call.key]
            had = call.sampled
            if call in self._prefilling:
                self._prefilling.remove(call)
                self._prefill_blocks -= self._own_blocks(call, call.sampled)
                computed = call.prompt + call.sampled - call.missing
            else:
                self._unjoin(call)
                computed = call.prompt + call.sampled
            call.sampled = had
            kept = max(0, computed - call.shared_tokens) // self.speed.block
            self._cache.release(call.chain, call.own, kept)
        self._leaving = []

    def _send_back(self, call: Call, *, keep: bool = True) -> None:
        """Take a running call off; it is computed again."""
        del self._running[call.key]
        self.totals.events += 1
        if call.running == _DECODES:
            self._unjoin(call)
            computed = call.prompt + call.sampled
        else:
            self._prefilling.remove(call)
            self._prefill_blocks -= self._own_blocks(call, call.sampled)
            computed = call.prompt + call.sampled - call.missing
        call.running = _WAITS
        kept = max(0, computed - call.shared_tokens) // self.speed.block if keep else 0
        self._cache.release(call.chain, call.own, kept)
        self._line_up(call)

    def _line_up(self, call: Call) -> None:
        """Whoever was taken off is next."""
        self._waiting.appendleft(call)

    # ── the scheduler's turn, between two steps ──

    def _schedule(self, now: float) -> None:
        speed, running, cache, blocks = self.speed, self._running, self._cache, self._blocks
        preempted = False
        growth = self._phases[-self._steps % speed.block]  # what the next step needs
        held = self._decode_blocks + self._prefill_blocks + cache.shared_blocks + growth
        while held > blocks and len(running) > 1:
            self._send_back(next(reversed(running.values())))
            self.totals.preemptions += 1
            preempted = True
            held = self._held + self._phases[-self._steps % speed.block]
        idle = cache.idle_blocks
        if idle and held + idle > blocks:
            cache.give_up(held + idle - blocks)
        budget = speed.max_batched_tokens - self._batch
        if self._prefilling:
            for call in self._prefilling:
                tokens = min(call.missing, budget)
                if tokens <= 0:
                    break
                self._chunks.append((call, tokens))
                budget -= tokens
        entries = self._entries
        if self._waiting and not preempted and not self._stopping:
            self._admit(budget, held)
        self._since = now
        if speed.pads:
            self._read = self._batch * self._longest()
        else:
            self._read = self._context - self._spares * self._again
        if self._chunks:
            self._plan_prefill(now, self._entries - entries)
        elif self._batch:
            self._plan_decode(now)
        else:
            self._planned = 0
            self.next_at = inf

    def _admit(self, budget: int, held: int) -> None:
        """Let the line in, in order, while blocks, places and the step's tokens last."""
        speed, waiting, running, cache = self.speed, self._waiting, self._running, self._cache
        block, capacity = speed.block, self._blocks
        while waiting:
            call = waiting[0]
            if call.running == _GONE:
                waiting.popleft()
                self._dead_waiting -= 1
                continue
            if budget <= 0 or len(running) >= speed.max_num_seqs:
                return
            context = call.prompt + call.sampled
            own = -(-(context - call.shared_tokens) // block)
            chain = call.chain
            needed = own + cache.missing(chain) if chain else own
            if running and held + needed > capacity:
                if not speed.enters_by_chunk or held >= capacity:
                    return
                if held + -(-(self.found(call, context) + budget) // block) > capacity:
                    return
            waiting.popleft()
            found = self.found(call, context)
            totals = self.totals
            totals.events += 1
            totals.queries += context
            totals.hits += found
            if call.entry < 0:
                call.cached = found
            else:
                totals.recomputed += context - found
            cache.pin(chain, call.own)
            held += needed
            if cache.idle_blocks and held + cache.idle_blocks > capacity:
                cache.give_up(held + cache.idle_blocks - capacity)
            self._entries += 1
            call.entry = self._entries
            call.running = _PREFILLS
            call.missing = context - found
            self._prefill_blocks += own
            self._prefilling.append(call)
            running[call.key] = call
            tokens = min(call.missing, budget)
            self._chunks.append((call, tokens))
            budget -= tokens

    def found(self, call: Call, context: int) -> int:
        """Tokens of its context that need no prefill; `context`: how many it has."""
        block = self.speed.block
        found = self._cache.hits(call.chain, call.own) * block
        if call.reusable is not None and call.entry < 0:  # later, what is cached is its own
            found = min(found, call.reusable // block * block)
        found = max(found, call.restored)
        return min(found, (context - 1) // block * block)

    def _plan_prefill(self, now: float, entered: int) -> None:
        speed, batch = self.speed, self._batch
        tokens, attention = 0, 0.0
        for call, chunk in self._chunks:
            tokens += chunk
            attention += chunk * (call.prompt + call.sampled - call.missing + chunk / 2)
        sequences = batch + len(self._chunks)
        self._step_s = (
            speed.gemm_s(sequences, batch + tokens)
            + speed.overhead_s
            + sequences * speed.seq_s
            + attention * speed.attention_s
            + entered * speed.request_s
        )
        self._kv_s, self._pass_tokens = speed.kv_s, 1.0  # a step that prefills is full without drafts
        self._planned = 1
        self.next_at = now + self._step_s + speed.kv_s * (self._read + batch)

    def _plan_decode(self, now: float) -> None:
        batch, steps, finishes = self._batch, self._steps, self._finishes
        if self._drafter is not None:
            self._step_s, self._kv_s, self._pass_tokens = self._drafter.pace(batch, self._read, self._likely)
        else:
            decode_s = self._decode_s
            while len(decode_s) <= batch:
                decode_s.append(self.speed.decode_s(len(decode_s)))
            self._step_s = decode_s[batch]
        while True:
            finish, entry, call = finishes[0]
            if call.entry == entry and call.running == _DECODES:
                break
            heappop(finishes)
        planned = finish - steps
        free = self._blocks - self._held
        if planned > 1 and planned * batch > free and len(self._running) > 1:
            planned = min(planned, self._steps_to_full(free))
        self._planned = planned
        self.next_at = now + self._seconds(planned)

    def _longest(self) -> int:
        """Tokens of the longest context that decodes."""
        own = (
            call.alignment + call.shared_tokens for call in self._running.values() if call.running == _DECODES
        )
        return max(own, default=-self._steps) + self._steps

    # ── blocks ──

    @property
    def _held(self) -> int:
        """Blocks that running calls hold."""
        return self._decode_blocks + self._prefill_blocks + self._cache.shared_blocks

    def _growth(self, steps: int) -> int:
        """Blocks that decoding calls will have taken after so many more steps."""
        block, phases = self.speed.block, self._phases
        cycles, rest = divmod(steps, block)
        if not rest:
            return cycles * self._batch
        # In the step that begins with step count s, those need a block whose alignment is -s modulo the block.
        last = -self._steps % block
        first = last - rest + 1
        more = sum(phases[first : last + 1]) if first >= 0 else sum(phases[: last + 1]) + sum(phases[first:])
        return cycles * self._batch + more

    def _steps_to_full(self, free: int) -> int:
        """Steps until the next one would find no block, at least 1."""
        block, phases = self.speed.block, self._phases
        cycles, left = divmod(free, self._batch)
        steps = cycles * block
        while (needed := phases[-(self._steps + steps) % block]) <= left:
            left -= needed
            steps += 1
        return max(1, steps)

    def _own_blocks(self, call: Call, sampled: int) -> int:
        return -(-(call.prompt + sampled - call.shared_tokens) // self.speed.block)
