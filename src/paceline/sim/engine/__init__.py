"""One inference engine in virtual time: what a batch, its contexts and a prefix cache do to its speed.

speed     how long a step takes: a roofline over a GPU's and a model's data sheet
hardware  the data sheets
cache     which prefixes are kept, and what goes when room is needed
model     the engine itself: queue, admission, chunked prefill, preemption, weights
"""

from __future__ import annotations

from paceline.sim.engine.hardware import GPUS, MODELS, GpuSpec, ModelSpec
from paceline.sim.engine.model import Call, EngineModel, Totals
from paceline.sim.engine.speed import Efficiency, Speed, speed_of

__all__ = [
    "GPUS",
    "MODELS",
    "Call",
    "Efficiency",
    "EngineModel",
    "GpuSpec",
    "ModelSpec",
    "Speed",
    "Totals",
    "speed_of",
]
