"""Python looks for reference cycles rarely while a simulation runs.

Ten thousand rollouts in flight are some hundred thousand objects, none of them in a cycle. The collector walks over them
again and again, which took nearly a tenth of the time of such a simulation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THRESHOLDS: Final = (100_000, 20, 50)
"""New objects before the collector looks at them, and how often it does before it looks at older ones, and at all."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """For the length of the block; a collector that is switched off stays so."""
    before = gc.get_threshold()
    gc.set_threshold(*map(max, before, _THRESHOLDS) if before[0] else before)
    try:
        yield
    finally:
        gc.set_threshold(*before)
