"""An unmodified program with the OpenAI SDK trains on the embedded engine, through the gateway."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from e2e_kit import CommandLine, acknowledged

from paceline.journal import read_rollouts

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent-program"


@pytest.mark.timeout(700)  # each of its rollouts is a process that imports the SDK
def test_an_unmodified_program_trains_and_every_token_has_its_logprob_and_version(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed: training an SDK's program is NOT covered")
    options = {
        "env.0.id": "reversing:Reversing",
        "env.0.limits.deadline_s": 500,
        "run.max_steps": 1,
        "batch.rollouts": 4,
        "admission.cap": 4,
        "filters.zero_advantage": False,  # whatever four rollouts come to is trained on
    }
    named = {name.replace(".", "__"): value for name, value in options.items()}
    for name in ("agent.py", "reversing.py"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    run = CommandLine(tmp_path, **named)
    assert run.end(within_s=600) == 0, run.said
    assert list(acknowledged(run.run_dir)) == [1]
    rollouts = [r for r in read_rollouts(run.run_dir) if r.turns]
    assert len(rollouts) >= 4
    for rollout in rollouts:
        for turn in rollout.turns:
            assert len(turn.sampled_ids) == len(turn.logprobs) == sum(n for _, n in turn.versions)
            assert sum(n for _, n in turn.roles) == len(turn.prompt_ids)
    assert sum(r.outcome.ending == "completed" and r.reward is not None for r in rollouts) >= 4
    seconds = [turn for rollout in rollouts for turn in rollout.turns[1:]]
    assert all(turn.extends for turn in seconds)
    assert any(turn.cached_tokens for turn in seconds) or not seconds
