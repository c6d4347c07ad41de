"""Environments: what a rollout acts in. `protocol` is the part to read before writing one."""

from __future__ import annotations

from paceline.envs.protocol import (
    ChatMessage,
    Context,
    EndlessTasks,
    Environment,
    InfrastructureError,
    ListTasks,
    Model,
    MultiTurnEnv,
    Observation,
    Reply,
    Result,
    RolloutTruncated,
    Says,
    ScoringError,
    SingleTurnEnv,
    TaskSource,
)
from paceline.envs.recorder import Recorder
from paceline.envs.registry import BUILT_IN, environment_class, make_environment
from paceline.envs.text import CutSide, cut_text

__all__ = [
    "BUILT_IN",
    "ChatMessage",
    "Context",
    "CutSide",
    "EndlessTasks",
    "Environment",
    "InfrastructureError",
    "ListTasks",
    "Model",
    "MultiTurnEnv",
    "Observation",
    "Recorder",
    "Reply",
    "Result",
    "RolloutTruncated",
    "Says",
    "ScoringError",
    "SingleTurnEnv",
    "TaskSource",
    "cut_text",
    "environment_class",
    "make_environment",
]
