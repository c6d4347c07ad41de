"""How fast a batch of rollouts could be made at best, whatever the order: a lower bound on its seconds.

Every step holds at most C tokens of KV and costs at least its fixed part, so the tokens times steps that lengths demand
cannot be spread over fewer steps than Q / C; and no rollout is faster than alone on an engine.

    W = sum of sampled tokens          Q = sum of (prompt·L / group + L²/2)       S = max(Q / C, W / most sequences)
    P = sum of prompt / group          R = sum of (prompt·L + L²/2)    what is read: a group's prompt is held once, and read by each
                                                                       of it, which may be cheaper
    work = ( max(S · weights, (W + P) · token) + S · overhead + W · sequence + R · kv + attention of prompts ) / engines
    path = L_max · (a step alone) + kv · (prompt·L_max + L_max²/2)
    bound = max(work, path)

Both may be far from what can be reached: where the longest takes more steps than full caches need for all the work, every
engine that one like it runs on makes as many. `even_s` is the time when that is all of them: S is then L_max an engine, if
that is more. It bounds what an order alone can do, but not where the longest are put together on a few engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.sim.engine.speed import Speed


class Bound(msgspec.Struct, frozen=True):
    """Seconds; the batch takes at least the larger."""

    work_s: float
    """Of all engines, working without a gap."""
    path_s: float
    """Of the longest rollout."""
    even_s: float
    """Of all engines, if each takes as many steps as the longest rollout."""

    @property
    def seconds(self) -> float:
        return max(self.work_s, self.path_s)

    def step_s(self, train_s: float, *, share: float = 1.0, overlapped: bool) -> float:
        """Seconds of a training step at best, which rolls out a `share` of these rollouts and trains for `train_s`: beside the rollouts,
        or after them. The longest of all may be in another step, so it is of work alone."""
        work_s = share * self.work_s
        return max(work_s, train_s) if overlapped else work_s + train_s


def lower_bound(
    prompts: Sequence[int] | NDArray[np.int64],
    lengths: Sequence[int] | NDArray[np.int64],
    speed: Speed,
    engines: int,
    *,
    group_size: int = 1,
) -> Bound:
    """For single-turn rollouts with these prompts and sampled tokens, [N] each; groups of `group_size` share the prefill,
    and the blocks of their prompt.

    ConfigError when there are none, or the two differ in number.
    """
    p, n = np.asarray(prompts, np.float64), np.asarray(lengths, np.float64)
    if not len(n) or len(p) != len(n):
        raise ConfigError(
            f"{len(p)} prompts and {len(n)} lengths are no batch: give one of each for every rollout"
        )
    work = float(n.sum())
    # A shared prompt is held once while any of its group runs. Each of them reads it, and all but one for `kv_again` of the cost.
    again = 1.0 if speed.pads else speed.kv_again
    area = float((p * n / group_size + n * n / 2).sum())
    read = float((p * n * (1 + (group_size - 1) * again) / group_size + n * n / 2).sum())
    prompted = float(p.sum()) / group_size
    attention = float((p * p).sum()) / 2 * speed.attention_s / group_size

    def busy_s(steps: float) -> float:
        """Of all engines together."""
        # Reading the weights is paid a step, computing a token, of a prompt or sampled; whichever is larger bounds both, and a step
        # that prefills beside sequences reads the weights once for all of it.
        gemm = max(steps * _read_s(speed, work / steps), (work + prompted) * speed.token_s)
        return gemm + steps * speed.overhead_s + work * speed.seq_s + read * speed.kv_s + attention

    steps = max(area / speed.kv_tokens, work / speed.max_num_seqs)
    longest = int(np.argmax(n))
    alone = n[longest] * speed.decode_s(1) + speed.kv_s * (p[longest] * n[longest] + n[longest] ** 2 / 2)
    even = busy_s(max(steps, engines * float(n[longest])))
    return Bound(busy_s(steps) / engines, float(alone), even / engines)


def _read_s(speed: Speed, batch: float) -> float:
    """Seconds of a step to read weights, at least, on the mean over steps of `batch` sequences on the mean. How many experts a step reads
    is concave in its sequences, so that steps of one and steps of as many as can be read least between them."""
    one, most = speed.gemm_s(1, 0.0), speed.gemm_s(speed.max_num_seqs, 0.0)
    share = (batch - 1.0) / max(1, speed.max_num_seqs - 1)
    return one + min(1.0, max(0.0, share)) * (most - one)


def tail_probability(share: float, rollouts: int) -> float:
    """How likely a batch holds at least one of the rollouts that are a `share` of all: 2% of 128 are in it 92.5% of the
    time."""
    return 1.0 - (1.0 - share) ** rollouts
