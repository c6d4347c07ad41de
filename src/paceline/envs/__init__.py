"""Environments: what a rollout acts in. `protocol` is the part to read before writing one."""

from __future__ import annotations

from paceline.envs.endpoint import Endpoint
from paceline.envs.group_env import GroupEnv, MultiAgentEnv, Seat
from paceline.envs.program import ProgramEnv, ProgramRun
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
from paceline.envs.scoring import weighed
from paceline.envs.text import CutSide, cut_text
from paceline.envs.tool_env import ToolEnv
from paceline.envs.tools import BadCall, CallFormat, PlainCalls, TaggedCalls, Tool, ToolBox, ToolCall

__all__ = [
    "BUILT_IN",
    "BadCall",
    "CallFormat",
    "ChatMessage",
    "Context",
    "CutSide",
    "EndlessTasks",
    "Endpoint",
    "Environment",
    "GroupEnv",
    "InfrastructureError",
    "ListTasks",
    "Model",
    "MultiAgentEnv",
    "MultiTurnEnv",
    "Observation",
    "PlainCalls",
    "ProgramEnv",
    "ProgramRun",
    "Recorder",
    "Reply",
    "Result",
    "RolloutTruncated",
    "Says",
    "ScoringError",
    "Seat",
    "SingleTurnEnv",
    "TaggedCalls",
    "TaskSource",
    "Tool",
    "ToolBox",
    "ToolCall",
    "ToolEnv",
    "cut_text",
    "environment_class",
    "make_environment",
    "weighed",
]
