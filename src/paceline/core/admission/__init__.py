"""How many rollouts each engine may hold: one file a controller, one interface.

`docs/architecture.md` ("Admission") says what each of them does and what the core does with it.
"""

from __future__ import annotations

from paceline.core.admission.adaptive import AdaptiveCap
from paceline.core.admission.base import Admission, Bounds, Holdings
from paceline.core.admission.fixed import FixedCap
from paceline.core.admission.predictive import PredictiveCap

__all__ = ["AdaptiveCap", "Admission", "Bounds", "FixedCap", "Holdings", "PredictiveCap"]
