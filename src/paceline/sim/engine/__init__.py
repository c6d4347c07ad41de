"""One inference engine in virtual time: what a batch, its contexts and a prefix cache do to its speed.

speed        how long a step takes: a roofline over a GPU's and a model's data sheet
hardware     the data sheets
cache        which prefixes are kept, and what goes when room is needed
model        the engine itself: queue, admission, chunked prefill, preemption, weights
speculation  several tokens a pass of the model
split        prefill and decode on engines of their own, behind one address
ranks        an engine whose GPUs have sequences of their own, with the experts spread over all
endpoint     what a simulation asks of each of them
"""

from __future__ import annotations

from paceline.sim.engine.endpoint import Endpoint
from paceline.sim.engine.hardware import GPUS, MODELS, GpuSpec, ModelSpec
from paceline.sim.engine.model import Call, EngineModel, Totals
from paceline.sim.engine.ranks import RankedEngine
from paceline.sim.engine.speculation import Accepted, Speculation
from paceline.sim.engine.speed import Efficiency, Speed, speed_of
from paceline.sim.engine.split import Link, PrefillEngines, SplitEngine

__all__ = [
    "GPUS",
    "MODELS",
    "Accepted",
    "Call",
    "Efficiency",
    "Endpoint",
    "EngineModel",
    "GpuSpec",
    "Link",
    "ModelSpec",
    "PrefillEngines",
    "RankedEngine",
    "Speculation",
    "Speed",
    "SplitEngine",
    "Totals",
    "speed_of",
]
