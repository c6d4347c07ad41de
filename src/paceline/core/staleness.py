"""The only place that subtracts policy versions.

Step n trains v(n-1) and makes vn. Staleness counts optimizer steps between sampling and training (the lag that
AReaL bounds, arXiv:2505.24298), from the oldest version that sampled any trainable token, queue time included.
"""

from __future__ import annotations

from paceline.domain.ids import Version
from paceline.errors import InvariantError


def trained_by(step: int) -> Version:
    """The version that step `step` trains, with steps counted from 1."""
    return step - 1


def staleness(oldest: Version, step: int) -> int:
    """Optimizer steps between sampling under `oldest` and training in `step`; 0 is on-policy.

    InvariantError if `oldest` is yet to come: nothing can be sampled by weights that this step still has to make.
    """
    trains = trained_by(step)
    if oldest > trains:
        raise InvariantError(f"sampled by v{oldest}, newer than v{trains}, which step {step} trains")
    return trains - oldest


def oldest_allowed(step: int, bound: int) -> Version:
    """Oldest version whose tokens may train in `step` under a staleness bound of `bound` steps."""
    return trained_by(step) - bound


def lead(collecting: int, held: Version) -> int:
    """Steps that generation runs ahead: the step being collected trains a version this much newer than `held`."""
    return trained_by(collecting) - held
