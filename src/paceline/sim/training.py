"""The trainer of a simulation, and how the weights it publishes get into the engines.

ShipBatch ─▶ shipped ─▶ trained ─▶ PolicyPublished        UpdateWeights ─▶ the engine stands still ─▶ loaded ─▶ WeightsLoaded
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import EngineId
from paceline.sim.faults import FAILED_LOAD, Faults
from paceline.sim.world import TrainerModel, WeightsModel

if TYPE_CHECKING:
    from paceline.sim.simulation import Simulation


class Training:
    """One trainer. Batches are shipped, and trained on, one after the other."""

    def __init__(
        self,
        simulation: Simulation,
        trainer: TrainerModel,
        weights: WeightsModel,
        faults: Faults,
    ) -> None:
        self._simulation = simulation
        self._trainer = trainer
        self._weights = weights
        self._faults = faults
        self.trained = 0
        """Steps taken."""
        self._updates: dict[EngineId, tuple[do.UpdateWeights, float]] = {}
        """Weights that engines are about to load, and since when; they may still be finishing a step."""
        self._loads: Counter[EngineId] = Counter()
        """Tries to load weights that a fault may have hit."""
        self._train_free_at = 0.0
        self._ship_free_at = 0.0

    # ── the trainer ──

    def ship(self, command: do.ShipBatch) -> None:
        simulation = self._simulation
        self._ship_free_at = max(simulation.now, self._ship_free_at) + self._trainer.ship_s
        if self._trainer.ship_s:
            simulation.at(self._ship_free_at, self._shipped, command)
        else:
            simulation.soon(self._shipped, command)

    def _shipped(self, command: do.ShipBatch) -> None:
        simulation, batch = self._simulation, command.batch
        seconds = self._trainer.seconds(batch)
        simulation.post(on.BatchShipped(batch.step, 10 * batch.tokens, 0.0, self._trainer.ship_s))
        self._train_free_at = max(simulation.now, self._train_free_at) + seconds
        simulation.at(self._train_free_at, self._step_trained, batch.step, seconds)

    def _step_trained(self, step: int, seconds: float) -> None:
        simulation = self._simulation
        self.trained = step
        simulation.post(on.StepTrained(step, {"step_s": seconds}))
        if self._trainer.publish_s:
            simulation.at(simulation.now + self._trainer.publish_s, self._publish, step)
        else:
            self._publish(step)

    def _publish(self, step: int) -> None:
        self._simulation.post(on.PolicyPublished(step, f"weights/v{step}"))

    # ── weights into engines ──

    def update(self, command: do.UpdateWeights) -> None:
        self._simulation.soon(self._update, command)

    def _update(self, command: do.UpdateWeights) -> None:
        simulation, name = self._simulation, command.engine
        engine = simulation.engines[name]
        self._updates[name] = command, simulation.now
        if name in simulation.lost:
            self.lost(name)
            return
        simulation.bring_up(name, engine)
        engine.stop(simulation.now, drain=self._weights.mode == "drain")
        if engine.is_still:
            self._load(name)
        else:
            simulation.arm(name, engine)

    def stands(self, name: EngineId) -> None:
        """The engine stands still: weights that wait for it go in."""
        if name in self._updates:
            self._load(name)

    def _load(self, name: EngineId) -> None:
        simulation = self._simulation
        command, since = self._updates.pop(name)
        life = simulation.lives[name]
        if self._weights.load_s:
            simulation.at(simulation.now + self._weights.load_s, self._load_ended, name, command, since, life)
        else:
            self._load_ended(name, command, since, life)

    def _load_ended(self, name: EngineId, command: do.UpdateWeights, since: float, life: int) -> None:
        simulation = self._simulation
        engine = simulation.engines[name]
        error = None
        was_lost = simulation.lives[name] != life
        if was_lost:
            error = "connection refused"
        else:
            self._loads[name] += 1
            if self._faults.of_load(name, self._loads[name]):
                error = FAILED_LOAD
        if not was_lost:
            version = command.version if error is None else None
            engine.go_on(simulation.now, version, recompute=self._weights.mode == "recompute")
            simulation.arm(name, engine)
        simulation.post(on.WeightsLoaded(name, command.version, simulation.now - since, error))

    def lost(self, name: EngineId) -> None:
        """The engine is gone; if it was to load, that has failed."""
        simulation = self._simulation
        if name not in self._updates:
            return
        command, since = self._updates.pop(name)
        simulation.post(on.WeightsLoaded(name, command.version, simulation.now - since, "connection refused"))
