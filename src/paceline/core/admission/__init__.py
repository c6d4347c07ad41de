"""How many rollouts each engine may hold: one file a controller, one interface.

`docs/architecture.md` ("Admission") says what each of them does and what the core does with it.
"""

from __future__ import annotations

from paceline.core.admission.adaptive import AdaptiveCap
from paceline.core.admission.base import Admission, Controller, Holdings
from paceline.core.admission.fixed import FixedCap

__all__ = ["AdaptiveCap", "Admission", "Controller", "FixedCap", "Holdings"]
