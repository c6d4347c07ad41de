"""The next batches are begun while the last one trains, within a bounded lag."""

from __future__ import annotations

from paceline.core.scheduling.base import Scheduling


class Overlap(Scheduling):
    """Places by `Pacing`; whatever is not done when a batch is cut trains in the next."""
