"""What simulated rollouts do: drawn from distributions, or recorded."""

from __future__ import annotations

from paceline.sim.plan import RolloutPlan, Workload
from paceline.sim.workloads.agents import Agents, AgentTurns, Tool
from paceline.sim.workloads.presets import PRESETS
from paceline.sim.workloads.reasoning import Reasoning, ReasoningLengths
from paceline.sim.workloads.recorded import Recorded, plan_of

__all__ = [
    "PRESETS",
    "AgentTurns",
    "Agents",
    "Reasoning",
    "ReasoningLengths",
    "Recorded",
    "RolloutPlan",
    "Tool",
    "Workload",
    "plan_of",
    "workload_of",
]


def workload_of(shape: ReasoningLengths | AgentTurns, seed: int) -> Workload:
    """The workload that a section describes."""
    return Reasoning(shape, seed) if isinstance(shape, ReasoningLengths) else Agents(shape, seed)
