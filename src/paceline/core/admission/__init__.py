"""How many rollouts each engine may hold: one file a controller, one interface."""

from __future__ import annotations

from paceline.core.admission.base import Admission
from paceline.core.admission.fixed import FixedCap

__all__ = ["Admission", "FixedCap"]
