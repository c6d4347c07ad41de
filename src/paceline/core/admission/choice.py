"""The controller that a config names."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config import FixedAdmission, RunConfig
from paceline.core.admission.adaptive import AdaptiveCap
from paceline.core.admission.base import Admission, Bounds
from paceline.core.admission.fixed import FixedCap
from paceline.core.admission.predictive import PredictiveCap
from paceline.domain.ids import EnvName


def admission_of(config: RunConfig, scores_groups: Mapping[EnvName, bool]) -> Admission:
    """The controller of `[admission]`. `scores_groups`: whether an environment scores its groups whole, which must then
    fit whole; one that is not in it does not."""
    section = config.admission
    if isinstance(section, FixedAdmission):
        return FixedCap(section.cap)
    whole = [env.group_size for env in config.env if scores_groups.get(env.label)]
    bounds = Bounds(
        floor=max([section.min_inflight, *whole]),
        most=section.max_inflight,
        initial=section.initial_inflight,
        longest=config.batch.seq_len,
        group=max(env.group_size for env in config.env),
    )
    return AdaptiveCap(bounds) if section.type == "adaptive" else PredictiveCap(bounds, risk=section.risk)
