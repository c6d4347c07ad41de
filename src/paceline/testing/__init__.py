"""The test kit, public: what Paceline is tested with, for testing your own environments and algorithms.

`World` drives the core alone, with scripted durations, endings and faults, and `Invariants` watches that nothing is
lost, nothing happens twice and no bound is passed. `play` runs one rollout of an environment against scripted answers,
`play_group` a whole group.
`run_driver` runs the whole asyncio runtime on virtual time, with a `ScriptedEngine`, a `ScriptedEnv` and a
`ScriptedTrainer`. `run_virtual` runs any coroutine on virtual time. `replays` makes a test of
a run's kept journal.
"""

from __future__ import annotations

from paceline.testing.engine import ScriptedEngine
from paceline.testing.env import ScriptedEnv, follow, one_call
from paceline.testing.invariants import Invariants
from paceline.testing.kept import replays
from paceline.testing.loop import VirtualTimeLoop, run_virtual
from paceline.testing.play import play, play_group
from paceline.testing.run import Controls, DriverRun, MemoryJournal, run_driver
from paceline.testing.script import Plan, Script, alternating, chaos, coin, setup_for, train_env
from paceline.testing.trace import Trace
from paceline.testing.trainer import ScriptedTrainer
from paceline.testing.world import World

__all__ = [
    "Controls",
    "DriverRun",
    "Invariants",
    "MemoryJournal",
    "Plan",
    "Script",
    "ScriptedEngine",
    "ScriptedEnv",
    "ScriptedTrainer",
    "Trace",
    "VirtualTimeLoop",
    "World",
    "alternating",
    "chaos",
    "coin",
    "follow",
    "one_call",
    "play",
    "play_group",
    "replays",
    "run_driver",
    "run_virtual",
    "setup_for",
    "train_env",
]
