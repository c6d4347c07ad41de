"""The test kit, public: what Paceline is tested with, for testing your own environments and algorithms.

`World` drives the core alone, with scripted durations, endings and faults, and `Invariants` watches that nothing is
lost, nothing happens twice and no bound is passed. `play` runs one rollout of an environment against scripted answers.
`run_virtual` runs coroutines on virtual time.
"""

from __future__ import annotations

from paceline.testing.invariants import Invariants
from paceline.testing.loop import VirtualTimeLoop, run_virtual
from paceline.testing.play import play
from paceline.testing.script import Plan, Script, alternating, chaos, coin, setup_for, train_env
from paceline.testing.trace import Trace
from paceline.testing.world import World

__all__ = [
    "Invariants",
    "Plan",
    "Script",
    "Trace",
    "VirtualTimeLoop",
    "World",
    "alternating",
    "chaos",
    "coin",
    "play",
    "run_virtual",
    "setup_for",
    "train_env",
]
