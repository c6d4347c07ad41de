"""Simulations that are watched: after every decision, what `Invariants` demands is looked at.

Simulation(core, engines, ..., watch=Checked())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from paceline.core.admission import Admission
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.sim.simulation import Simulation
from paceline.testing.invariants import Invariants


class _View:
    """A simulation as `Invariants` looks at it."""

    resumed = False

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @property
    def core(self) -> Core:
        return self._simulation.core

    @property
    def setup(self) -> CoreSetup:
        return self.core.setup

    @property
    def admission(self) -> Admission:
        return self.core._admission

    @property
    def running(self) -> Mapping[RolloutId, object]:
        return self._simulation.running

    @property
    def held(self) -> Mapping[EngineId, Version]:
        return {name: engine.version for name, engine in self._simulation.engines.items()}

    @property
    def lost(self) -> Set[EngineId]:
        return self._simulation.lost


class Checked:
    """Raises InvariantError, naming the first rule that a decision broke."""

    def __init__(self) -> None:
        self._invariants = Invariants()

    def __call__(self, simulation: Simulation, event: Event, commands: Sequence[Command]) -> None:
        self._invariants(_View(simulation), event, commands)
