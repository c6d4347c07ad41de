"""Every config model, one file a section; `load` reads TOML and command-line overrides into them."""

from __future__ import annotations

from paceline.config.admission import (
    AdaptiveAdmission,
    AdmissionSection,
    FixedAdmission,
    PredictiveAdmission,
)
from paceline.config.algorithm import AlgorithmSection
from paceline.config.base import Section
from paceline.config.batch import BatchSection
from paceline.config.engine import ChatSection, EmbeddedEngine, EngineSection, SglangEngine, VllmEngine
from paceline.config.environment import EnvSection, EvalSection, GateSection, Limits
from paceline.config.filters import (
    FiltersSection,
    GibberishFilter,
    LengthFilter,
    PreFilter,
    RepetitionFilter,
)
from paceline.config.gateway import GatewaySection
from paceline.config.journal import JournalSection
from paceline.config.metrics import MetricsSection, PrometheusSection, TensorboardSection, WandbSection
from paceline.config.mix import MixSection
from paceline.config.model import ModelSection, SamplingOverride, SamplingSection
from paceline.config.run import RunConfig, RunSection
from paceline.config.scheduling import (
    DividedScheduling,
    KvAreaScheduling,
    OverlapScheduling,
    OverprovisionScheduling,
    PartialScheduling,
    SchedulingSection,
    SynchronousScheduling,
    TailRoundsScheduling,
    UnbiasedTailScheduling,
)
from paceline.config.trainer import CheckpointSection, ExternalTrainer, ReferenceTrainer, TrainerSection
from paceline.config.workers import InlineWorkers, ProcessWorkers, RayWorkers, WorkersSection

__all__ = [
    "AdaptiveAdmission",
    "AdmissionSection",
    "AlgorithmSection",
    "BatchSection",
    "ChatSection",
    "CheckpointSection",
    "DividedScheduling",
    "EmbeddedEngine",
    "EngineSection",
    "EnvSection",
    "EvalSection",
    "ExternalTrainer",
    "FiltersSection",
    "FixedAdmission",
    "GateSection",
    "GatewaySection",
    "GibberishFilter",
    "InlineWorkers",
    "JournalSection",
    "KvAreaScheduling",
    "LengthFilter",
    "Limits",
    "MetricsSection",
    "MixSection",
    "ModelSection",
    "OverlapScheduling",
    "OverprovisionScheduling",
    "PartialScheduling",
    "PreFilter",
    "PredictiveAdmission",
    "ProcessWorkers",
    "PrometheusSection",
    "RayWorkers",
    "ReferenceTrainer",
    "RepetitionFilter",
    "RunConfig",
    "RunSection",
    "SamplingOverride",
    "SamplingSection",
    "SchedulingSection",
    "Section",
    "SglangEngine",
    "SynchronousScheduling",
    "TailRoundsScheduling",
    "TensorboardSection",
    "TrainerSection",
    "UnbiasedTailScheduling",
    "VllmEngine",
    "WandbSection",
    "WorkersSection",
]
