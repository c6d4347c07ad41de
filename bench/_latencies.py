"""Measured times between tokens, and how far the engine model is off: with the constants that it ships with, and with
constants fitted to a part of the points and asked about the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.sim.engine import GPUS, MODELS, Efficiency, Speed, speed_of
from paceline.sim.fit import non_negative


class Latency(NamedTuple):
    """One measurement: vLLM 0.15.1 on H100."""

    model: str
    gpus: int
    requests: float
    """At once, on the mean."""
    prompt: int
    sampled: int
    ms: float
    """Between two tokens of a request."""

    @property
    def speed(self) -> Speed:
        return speed_of(MODELS[self.model], GPUS["H100"], gpus=self.gpus)

    @property
    def contexts(self) -> float:
        """Tokens that a step reads."""
        return self.requests * (self.prompt + self.sampled / 2)

    @property
    def stall_s(self) -> float:
        """Each request's prefill stalls the others once in its lifetime: what that adds to a token."""
        return self.speed.prefill_s(0, self.prompt) * self.requests / self.sampled


LATENCIES: Final = (
    Latency("qwen2.5-7b", 1, 10.6, 750, 251, 7.02),
    Latency("qwen2.5-7b", 1, 10.7, 1034, 1448, 7.45),
    Latency("llama-2-7b", 1, 9.1, 566, 247, 9.26),
    Latency("llama-2-7b", 1, 22.2, 566, 247, 11.23),
    Latency("llama-2-7b", 1, 17.1, 1034, 1448, 15.20),
    Latency("mistral-nemo-12b", 1, 12.2, 566, 247, 9.86),
    Latency("mistral-nemo-12b", 1, 26.3, 566, 247, 10.58),
    Latency("llama-3.1-70b", 4, 10.5, 547, 248, 17.08),
    Latency("llama-3.1-70b", 4, 27.7, 547, 248, 18.80),
)


def as_shipped(point: Latency) -> float:
    """Relative error of the model with its own constants."""
    speed, batch = point.speed, point.requests
    step = speed.gemm_s(round(batch), batch) + speed.overhead_s + batch * speed.seq_s
    return 1000 * (step + speed.kv_s * point.contexts + point.stall_s) / point.ms - 1


def left_out(like: Callable[[Latency], object]) -> list[float]:
    """Relative error of each point by constants that were fitted to the points which `like` does not count with it.

    Fitted are what reading weights, reading KV, a layer and a step cost; the rest is as shipped."""
    errors = []
    for point in LATENCIES:
        others = [each for each in LATENCIES if like(each) != like(point)]
        design = np.array([_costs(each) for each in others])
        took = np.array([each.ms / 1000 - _known_s(each) for each in others])
        fitted = non_negative(design, took)
        told = float(_costs(point) @ fitted) + _known_s(point)
        errors.append(1000 * told / point.ms - 1)
    return errors


def mean_error(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _costs(point: Latency) -> NDArray[np.float64]:
    """float64[4]: seconds of a step at the full bandwidth for weights and KV, its layers, and one for the step itself."""
    speed, e = point.speed, Efficiency()
    model = MODELS[point.model]
    kv = e.kv_mha if (model.kv_heads or model.heads) == model.heads else e.kv
    return np.array([speed.weights_s * e.weights, speed.kv_s * kv * point.contexts, float(model.layers), 1.0])


def _known_s(point: Latency) -> float:
    """What is not fitted: all-reduces, sequences, prefills of others."""
    speed, e = point.speed, Efficiency()
    launched = MODELS[point.model].layers * e.layer_s + e.step_s
    return speed.overhead_s - launched + point.requests * speed.seq_s + point.stall_s
