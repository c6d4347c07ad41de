"""An engine whose attention is data parallel: each of its GPUs, a rank, has sequences of its own.

    request ─▶ the rank with fewest requests ─▶ its queue, its KV blocks, its prefix cache

The experts are spread over all ranks, and every rank keeps and reads the rest of the weights itself (`speed_of` with
`expert_parallel`). A request stays on its rank until it ends, as under vLLM's balancing of data parallel ranks: one that
meets long answers has a full cache and preempts while others have room. That is what the memory of such an engine taken as
one hides.

A rank is an engine model whose steps cost what a step costs when all ranks have as much to do as it has. What is left out:
in truth the ranks exchange tokens in every layer, so one that has less to do waits for the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

import msgspec

from paceline.domain.ids import Version
from paceline.domain.load import EngineLoad
from paceline.errors import ConfigError
from paceline.sim.engine.calls import Call, Totals
from paceline.sim.engine.model import EngineModel
from paceline.sim.engine.speed import Speed


def rank_speed(speed: Speed, ranks: int) -> Speed:
    """Of one rank of an engine with this speed: its share of the memory and the limits, and the same seconds for a step in
    which every rank has as many tokens. ConfigError when the longest context does not fit a rank."""
    kv_tokens = speed.kv_tokens // ranks
    if speed.max_model_len > kv_tokens:
        raise ConfigError(
            f"a context of {speed.max_model_len} tokens does not fit one of {ranks} ranks with {kv_tokens}: attention is data "
            "parallel with engines.expert_parallel, and a context is on one GPU; take a shorter cap, or leave that out"
        )
    return msgspec.structs.replace(
        speed,
        kv_tokens=kv_tokens,
        max_num_seqs=-(-speed.max_num_seqs // ranks),
        max_batched_tokens=-(-speed.max_batched_tokens // ranks),
        expert_share=1.0 - (1.0 - speed.expert_share) ** ranks,
        token_s=ranks * speed.token_s,
        kv_s=ranks * speed.kv_s,
        attention_s=ranks * speed.attention_s,
        exchange_s=ranks * speed.exchange_s,
        seq_s=ranks * speed.seq_s,
    )


class RankedEngine:
    """Ranks behind one address."""

    def __init__(self, speed: Speed, ranks: int, version: Version = 0) -> None:
        """`speed`: of all ranks together."""
        self._speed = speed
        self.ranks = [EngineModel(rank_speed(speed, ranks), version) for _ in range(ranks)]
        self.next_at = inf
        """When a rank has something to do; kept, since it is asked for far more often than it changes."""
        self._of: dict[Hashable, int] = {}
        """By call: the rank that has it."""
        self._counts = [0] * ranks
        """Calls of each rank."""

    # ── what it tells ──

    @property
    def speed(self) -> Speed:
        return self._speed

    @property
    def version(self) -> Version:
        return self.ranks[0].version

    @version.setter
    def version(self, version: Version) -> None:
        for rank in self.ranks:
            rank.version = version

    @property
    def is_still(self) -> bool:
        return all([rank.is_still for rank in self.ranks])

    @property
    def totals(self) -> Totals:
        """Sums over the ranks, each of which makes its own steps; seconds of computing are their mean."""
        of = [rank.totals for rank in self.ranks]
        sums = {name: sum([getattr(each, name) for each in of]) for name in Totals.__struct_fields__}
        return Totals(**sums | {"busy_s": sums["busy_s"] / len(of)})

    def load(self, now: float) -> EngineLoad:
        """Its KV usage is the mean of the ranks': one may be full when this is not."""
        loads = [rank.load(now) for rank in self.ranks]
        return EngineLoad(
            running=sum([load.running for load in loads]),
            waiting=sum([load.waiting for load in loads]),
            kv_usage=sum([load.kv_usage for load in loads]) / len(loads),
            preemptions=sum([load.preemptions for load in loads]),
            prefix_queries=sum([load.prefix_queries for load in loads]),
            prefix_hits=sum([load.prefix_hits for load in loads]),
            generated_tokens=sum([load.generated_tokens for load in loads]),
        )

    def busy_until(self, now: float) -> tuple[float, float]:
        busy = [rank.busy_until(now) for rank in self.ranks]
        return sum([seconds for seconds, _ in busy]) / len(busy), sum([area for _, area in busy])

    # ── requests ──

    def submit(self, call: Call, now: float) -> None:
        counts = self._counts
        number = counts.index(min(counts))
        counts[number] += 1
        self._of[call.key] = number
        rank = self.ranks[number]
        rank.submit(call, now)
        self.next_at = min(self.next_at, rank.next_at)

    def abort(self, call: Call, now: float) -> None:
        if call.running < 0:
            return  # it was not sent yet
        rank = self.ranks[self._left(call)]
        rank.abort(call, now)
        self.next_at = min(self.next_at, rank.next_at)

    def run(self, now: float) -> list[Call]:
        done: list[Call] = []
        for rank in self.ranks:
            if rank.next_at <= now:
                done += rank.run(now)
        for call in done:
            self._left(call)
        self._look()
        return done

    def _left(self, call: Call) -> int:
        """A call has left its rank."""
        number = self._of.pop(call.key)
        self._counts[number] -= 1
        return number

    def _look(self) -> None:
        self.next_at = min([rank.next_at for rank in self.ranks])

    # ── weights, and the end ──

    def stop(self, now: float, *, drain: bool = False) -> None:
        """Every rank stands still when it is done with its step, or with what it has."""
        for rank in self.ranks:
            rank.stop(now, drain=drain)
        self._look()

    def go_on(self, now: float, version: Version | None = None, *, recompute: bool = False) -> None:
        for rank in self.ranks:
            rank.go_on(now, version, recompute=recompute)
        self._look()

    def kill(self) -> list[Call]:
        self._of.clear()
        self._counts = [0] * len(self.ranks)
        calls = [call for rank in self.ranks for call in rank.kill()]
        self._look()
        return calls
