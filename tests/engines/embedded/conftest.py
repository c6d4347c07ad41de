from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Makes a tiny random model, once for each set of arguments."""
    from embedded_kit import make_model

    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", *, tied: bool = True, seed: int = 0) -> Path:
        key = f"{kind}-{'tied' if tied else 'untied'}-{seed}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(key), kind, tied=tied, seed=seed)
        return made[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """As the engine does: on shared cores, the barriers of a second thread cost more than the work."""
    with contextlib.suppress(ImportError):  # then only tests that need no torch run here
        import torch

        torch.set_num_threads(1)
