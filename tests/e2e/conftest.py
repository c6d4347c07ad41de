from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import MODEL, RUNNING

from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.process import EngineProcess
from paceline.tokens.tokenizer import resolve_model_dir


@pytest.fixture(scope="session")
def model() -> Path:
    return resolve_model_dir(MODEL)


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines that were started by somebody else, and stay on from run to run."""
    pytest.importorskip("torch")
    log = (tmp_path_factory.mktemp("servers") / "engines.log").open("wb")
    options = EngineOptions(model=model, kv_tokens=4096, max_num_seqs=32)
    with log:
        started = [EngineProcess.start(options, stderr=log) for _ in range(2)]
        yield started
        for server in started:
            server.stop()


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    for process in RUNNING:
        process.kill()  # what it started ends by itself then
        process.wait()
    RUNNING.clear()
