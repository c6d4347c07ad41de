"""The controller that a config names."""

from __future__ import annotations

from collections.abc import Collection

from paceline.config import FixedAdmission, RunConfig
from paceline.core.admission.adaptive import AdaptiveCap
from paceline.core.admission.base import Admission, Bounds
from paceline.core.admission.fixed import FixedCap
from paceline.core.admission.predictive import PredictiveCap
from paceline.domain.ids import EnvName


def admission_of(config: RunConfig, scored_whole: Collection[EnvName]) -> Admission:
    """`scored_whole`: environments whose groups are scored whole, and so must fit whole."""
    section = config.admission
    if isinstance(section, FixedAdmission):
        return FixedCap(section.cap)
    whole = [env.group_size for env in config.env if env.label in scored_whole]
    bounds = Bounds(
        floor=max([section.min_inflight, *whole]),
        most=section.max_inflight,
        initial=section.initial_inflight,
        longest=config.batch.seq_len,
        group=max(env.group_size for env in config.env),
    )
    return AdaptiveCap(bounds) if section.type == "adaptive" else PredictiveCap(bounds, risk=section.risk)
