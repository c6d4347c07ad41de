"""Continuous batching: which sequences compute how many tokens in the next step, and which blocks they use.

    add ──► waiting ──► running ──► removed (finished or aborted)
              ▲            │
              └─ preempted ┘   blocks ran out: the last to run gives its blocks back and recomputes later

Every running sequence decodes one token or prefills a chunk; then waiting ones are admitted, first come,
first served, while the step has tokens, rows and blocks left. No tensors here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.engines.embedded.kv import BlockPool, extend_hashes, prefix_root
from paceline.engines.embedded.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request that cannot be served as it is; whoever sent it must change it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence, from arrival to result."""

    id: str
    ids: list[int]
    """The prompt, then what was sampled."""
    prompt_tokens: int
    token_limit: int
    """Length of `ids` at which it ends: by max_tokens or by the context."""
    params: SamplingParams
    seed: int
    eos: frozenset[int]
    stop_ids: frozenset[int]
    salt: str | None
    on_done: Callable[[Request], object]
    on_token: Callable[[Request], object] | None = None
    """Called after each token but the last."""
    arrived: float
    """This and the times below are seconds on the monotonic clock."""
    first_run: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(weights epoch, first output token sampled under it), in order."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stop_text: str | None = None
    """The output's text, cut at the stop string that was found."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    preemptions: int = 0

    row: int = -1
    """Its row in the block table; -1 unless running."""
    computed: int = 0
    """Leading ids whose K and V are in the cache."""
    computed_once: int = 0
    """Leading ids that were in the cache before it lost its blocks."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    hash_epoch: int = -1
    publishes: bool = True
    """False while some of its KV is of older weights, which nobody else must find."""

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_tokens :]


@dataclass(slots=True)
class Counters:
    """Monotonic counts since the start, in tokens but for `preemptions` and `steps`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recomputed_tokens: int = 0
    """Computed again after a preemption or a weight swap."""
    preemptions: int = 0
    """For want of blocks only; a weight swap is not one."""
    steps: int = 0


class Scheduler:
    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_batched_tokens: int, max_len: int
    ) -> None:
        self.block_size, self.max_batched_tokens = block_size, max_batched_tokens
        self.pool = BlockPool(num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self.epoch = 0
        """Of the weights: KV and hashes of an older one are never matched."""
        self.table = np.zeros((max_num_seqs, -(-max_len // block_size)), dtype=np.int64)
        """Blocks of the running sequences, one row each, padded with block 0."""
        self._rows = list(range(max_num_seqs))[::-1]

    def plan(self, now: float) -> list[tuple[Request, int]]:
        """Sequences of the next step with the number of tokens each computes. Commits their blocks."""
        budget, planned, preempted = self.max_batched_tokens, list[tuple[Request, int]](), False
        while len(planned) < len(self.running) and budget:
            request = self.running[len(planned)]
            count = min(len(request.ids) - request.computed, budget)
            if not self._grow(request, request.computed + count):
                # The last to run has the least to lose. Those already planned come before it.
                victim = self.running.pop()
                self._unplace(victim)
                self.waiting.appendleft(victim)
                victim.preemptions += 1
                self.counters.preemptions += 1
                preempted = True
                continue
            self._publish(request, request.computed + count)
            planned.append((request, count))
            budget -= count
        # After a preemption an admission would take the very blocks that were wanting.
        while self.waiting and self._rows and budget and not preempted and self._place(self.waiting[0], now):
            request = self.waiting.popleft()
            self.running.append(request)
            count = min(len(request.ids) - request.computed, budget)
            self._publish(request, request.computed + count)
            planned.append((request, count))
            budget -= count
        return planned

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out of the queue or off its row."""
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._unplace(request)

    def drop_kv(self) -> None:
        """Forget all KV. Running sequences go back before the waiting, in their order, and recompute."""
        for request in reversed(self.running):
            self._unplace(request)
            self.waiting.appendleft(request)
        self.running.clear()
        self.pool.forget_all()

    def _place(self, request: Request, now: float) -> bool:
        """Give a waiting request a row and blocks for all its ids, reusing cached ones; False if too few."""
        size, length = self.block_size, len(request.ids)
        reusable = (length - 1) // size  # at least one token is computed, for its logits
        self._hash(request, reusable * size)
        matched = self.pool.match(request.hashes[:reusable])
        blocks = self.pool.take(-(-length // size) - len(matched), matched)
        if blocks is None:
            return False
        request.row, request.blocks, request.computed = self._rows.pop(), blocks, len(matched) * size
        self.table[request.row, : len(blocks)] = blocks
        if not request.first_run:
            request.first_run, request.cached_tokens = now, request.computed
            self.counters.prompt_tokens += length
            self.counters.prefix_queries += length
            self.counters.prefix_hits += request.computed
        self.counters.recomputed_tokens += max(0, request.computed_once - request.computed)
        return True

    def _unplace(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self.table[request.row] = 0
        self._rows.append(request.row)
        request.computed_once = max(request.computed_once, request.computed)
        request.row, request.computed, request.blocks, request.publishes = -1, 0, [], True

    def _grow(self, request: Request, length: int) -> bool:
        held = len(request.blocks)
        missing = -(-length // self.block_size) - held
        if missing <= 0:
            return True
        fresh = self.pool.take(missing)
        if fresh is None:
            return False
        request.blocks += fresh
        self.table[request.row, held : held + missing] = fresh
        return True

    def _hash(self, request: Request, upto: int) -> None:
        if request.hash_epoch != self.epoch:
            request.hashes, request.hash_epoch = [], self.epoch
        extend_hashes(
            request.hashes, prefix_root(self.epoch, request.salt), request.ids, self.block_size, upto
        )

    def _publish(self, request: Request, upto: int) -> None:
        """Let others find the blocks that this step fills: a step writes all KV before it reads any."""
        first, end = request.computed // self.block_size, upto // self.block_size
        if end > first and request.publishes:
            self._hash(request, upto)
            for index in range(first, end):
                self.pool.publish(request.blocks[index], request.hashes[index])
