"""The orchestrator is killed while rollouts are under way: they end in the next life with the tokens they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_kit import MODEL, CommandLine, records

from paceline.cli.main import main
from paceline.cli.resume import read_back
from paceline.core.parts import whole_parts
from paceline.core.recovery import EMPTY
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout
from paceline.errors import CannotFold, WireError
from paceline.journal import read_rollouts
from paceline.journal.partial import read_parts
from paceline.tokens.tokenizer import resolve_model_dir

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SLOW_GAME: dict[str, Any] = {
    "run__max_steps": 2,
    "env__0__id": "guess-number",
    "env__0__args__wait_s": 0.4,
    "sampling__max_tokens": 6,
    "scheduling__segment_tokens": 2,
    "admission__cap": 8,
    "batch__rollouts": 8,
}
"""Several guesses a rollout, each in parts, and time enough between them to be killed in the middle."""


def under_way(run_dir: Path) -> dict[RolloutId, tuple[Part, ...]]:
    """What a kill would leave now: rollouts that have tokens, and have not ended."""
    try:
        left = read_back(run_dir, EMPTY, {}).recovery.under_way
    except (CannotFold, WireError):
        return {}  # the journal is still to be begun
    written = read_parts(run_dir, [each.id for each in left])
    found = {each.id: whole_parts(written.get(each.id, ()), each.requests, each.sampled) for each in left}
    return {rollout: parts for rollout, parts in found.items() if len(parts) > 2}


def test_a_rollout_under_way_at_a_kill_ends_in_the_next_life_with_its_tokens_and_is_trained_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = CommandLine(tmp_path, **SLOW_GAME)
    run.when(lambda: len(under_way(run.run_dir)) >= 4, within_s=240)
    run.process.kill()
    run.process.wait()
    left = under_way(run.run_dir)
    assert len(left) >= 3, "some may have ended between the look and the kill"

    again = CommandLine(tmp_path, "--resume", str(tmp_path / "t"), **SLOW_GAME)
    assert again.end(within_s=240) == 0, again.said
    assert again.status.status == "done"
    assert again.summary["tokens_conserved"]
    assert "rollouts go on with" in again.said
    assert "does not do again" not in again.said

    told = records(again.run_dir)
    continued = {r.event.rollout: r.event for r in told if isinstance(r.event, on.RolloutContinued)}
    ended = {r.id: r for r in read_rollouts(again.run_dir)}
    shipped = [r for t in told for c in t.commands if isinstance(c, do.ShipBatch) for r in c.batch.rollouts]
    assert set(left) <= set(continued)
    for rollout, parts in left.items():
        event, record = continued[rollout], ended[rollout]
        assert event.tokens == sum(part.tokens for part in parts)
        # Journal and parts are written apart: the journal may know of a request whose part the kill has lost.
        assert event.lost <= 2 * SLOW_GAME["scheduling__segment_tokens"]
        assert record.outcome.ending == "completed"
        assert record.sampled_tokens > event.tokens or record.turns[-1].finish == "stop"
        before = np.concatenate([part.sampled_ids for part in parts])
        sampled = np.concatenate([turn.sampled_ids for turn in record.turns])
        np.testing.assert_array_equal(sampled[: len(before)], before)
        logprobs = np.concatenate([turn.logprobs for turn in record.turns])
        np.testing.assert_array_equal(logprobs[: len(before)], np.concatenate([p.logprobs for p in parts]))
        assert shipped.count(rollout) <= 1
    assert any(ended[rollout].sampled_tokens > continued[rollout].tokens for rollout in left)
    assert set(left) & set(shipped), "what went on is trained"
    assert largest_difference([ended[rollout] for rollout in left]) < 1e-3
    assert list((again.run_dir / "partial").iterdir()) == []

    assert main(["replay", str(again.run_dir)]) == 0
    assert main(["explain", str(again.run_dir), str(next(iter(left)))]) == 0
    tokens = continued[next(iter(left))].tokens
    assert f"continued after the restart from {tokens} tokens" in capsys.readouterr().out


def largest_difference(rollouts: list[Rollout]) -> float:
    """Between the logprobs of version 0's tokens and those that the policy gives them."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(resolve_model_dir(MODEL), dtype=torch.float32).eval()
    worst, compared = 0.0, 0
    for rollout in rollouts:
        context: list[int] = []
        for turn in rollout.turns:
            if not turn.extends:
                context = []
            context += turn.prompt_ids.tolist()
            first = len(context)
            context += turn.sampled_ids.tolist()
            with torch.no_grad():
                logits = policy(torch.tensor([context])).logits[0, first - 1 : -1].float()
            ids = torch.tensor(turn.sampled_ids, dtype=torch.long)
            expected = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0].numpy()
            versions = np.repeat([v for v, _ in turn.versions], [n for _, n in turn.versions])
            of_first = versions == 0
            compared += int(of_first.sum())
            if of_first.any():
                worst = max(worst, float(np.abs(expected - turn.logprobs)[of_first].max()))
    assert compared > 10
    return worst
