"""Which attempts, requests and loads fail: drawn for each by what it is, an attempt by the noise of its rollout: under every policy that
draws a rollout, it meets the same."""

from __future__ import annotations

from paceline.core.streams import key, uniform
from paceline.domain.ids import EngineId
from paceline.domain.rollout import Outcome
from paceline.sim.world import FaultModel

FAILED_CALL_S = 0.05
"""Mean seconds until a request that fails is answered."""
FAILED_CALL = "500 from a modelled engine"
FAILED_LOAD = "a modelled load failed"


class Faults:
    """Draws the faults of one run."""

    def __init__(self, model: FaultModel | None, seed: int) -> None:
        self.model = model or FaultModel()
        self._key = key(seed, "faults")

    def of_attempt(self, noise: int, attempt: int, turns: int) -> tuple[Outcome, int] | None:
        """How it fails, and before which of its turns; None if it does not."""
        model = self.model
        if not model.hits_rollouts:
            return None
        base = key(self._key, noise, attempt)
        chance = uniform(base, 0)
        if chance < model.infrastructure:
            cause = "infrastructure"
        elif chance < model.infrastructure + model.environment:
            cause = "environment"
        else:
            return None
        return Outcome("failed", cause, "a modelled fault"), int(uniform(base, 1) * max(1, turns))

    def of_call(self, noise: int, attempt: int, turn: int, request: int) -> float | None:
        """Seconds until a request fails, None if it does not: the turn's first is number 1."""
        share = self.model.call
        if not share:
            return None
        base = key(self._key, "call", noise, attempt, turn, request)
        return FAILED_CALL_S * (0.5 + uniform(base, 1)) if uniform(base, 0) < share else None

    def of_load(self, engine: EngineId, number: int) -> bool:
        """Whether an engine's load fails: its first is number 1, and each try is drawn anew."""
        share = self.model.load
        return share > 0 and uniform(key(self._key, "load", engine, number), 0) < share
