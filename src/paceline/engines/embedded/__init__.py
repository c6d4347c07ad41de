"""The embedded inference engine: small, plain, for laptops, tests and studies; needs the `train` extra.

engine = EngineProcess.start(EngineOptions(model="path/to/model"))   # its own process; torch stays out of yours
engine.url   # answers vLLM's routes: /v1/completions, /inference/v1/generate, /metrics, /pause, ...
engine.stop()
"""

from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.process import EngineProcess

__all__ = ["EngineOptions", "EngineProcess"]
