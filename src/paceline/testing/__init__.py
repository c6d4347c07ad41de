"""The test kit, public: what Paceline is tested with, for testing your own environments and algorithms."""

from __future__ import annotations

from paceline.testing.loop import VirtualTimeLoop, run_virtual

__all__ = ["VirtualTimeLoop", "run_virtual"]
