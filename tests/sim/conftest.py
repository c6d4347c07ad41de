from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`bench` is in the repository and is not installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        del sys.modules[name]
