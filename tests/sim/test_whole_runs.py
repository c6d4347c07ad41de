"""What the prediction of whole runs runs, does not hang."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("benches")


def test_a_run_that_hangs_is_stopped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import _whole

    monkeypatch.setattr(_whole, "MOST_S", 0.1)
    with pytest.raises(RuntimeError, match="the run few was stopped after 0 s without its 24 steps"):
        _whole._finished("few", ["sleep", "600"])
