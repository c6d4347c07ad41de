"""The tool example trains the policy upward, in a worker process, and the report tells tool waits from engine time."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_kit import records

import paceline
from paceline.domain import events as on
from paceline.domain.rollout import Rollout

EXAMPLE = Path(__file__).parents[2] / "examples" / "store-search" / "run.toml"


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.timeout(900)
def test_a_policy_with_a_tool_learns_to_use_it_and_its_waits_are_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    summary = paceline.run(EXAMPLE, run={"dir": str(tmp_path), "max_steps": 12}, eval="[]")
    assert (summary["status"], summary["steps"]) == ("done", 12)
    run_dir = tmp_path / "store-search"
    ended: list[Rollout] = [r.event.rollout for r in records(run_dir) if isinstance(r.event, on.RolloutEnded)]
    done = [r for r in ended if r.outcome.ending == "completed" and r.reward is not None]
    quarter = len(done) // 4

    def mean(some: list[Rollout]) -> float:
        return sum(r.reward or 0.0 for r in some) / len(some)

    assert mean(done[-quarter:]) > mean(done[:quarter]) + 0.05
    assert sum(r.metrics["tool_calls"] for r in done) > len(done)
    # Each call that is not refused waits 50 ms on the database: that is environment time, not the engine's.
    assert all(r.env_s > 0.045 * (r.metrics["tool_calls"] - r.metrics["tool_errors"]) for r in done)
    assert (run_dir / "report.html").exists() or list(run_dir.glob("*.html"))
    logs = list((run_dir / "logs").glob("env-store-search-*.log"))
    assert len(logs) == 1
