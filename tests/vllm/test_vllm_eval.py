"""A config's evals, played by a real vLLM's chat route: what any OpenAI-compatible endpoint is asked and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_kit import Server

from paceline.cli.main import main


def test_the_evals_of_a_config_are_played_by_its_chat_route(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "run.toml", tmp_path / "rollouts.jsonl"
    config.write_text(
        f"""
model.name = "{tmp_path / "nowhere"}"
[chat.small]
url = "{server.url}/v1"
model = "policy"
[[env]]
id = "reverse-text"
[[eval]]
id = "reverse-text"
examples = 16
k = 2
sampling.max_tokens = 24
[[eval]]
id = "guess-number"
examples = 4
sampling.max_tokens = 8
"""
    )
    assert main(["eval", str(config), "--chat", "small", "--out", str(out), "--json"]) == 0
    reverse, guess = map(json.loads, capsys.readouterr().out.splitlines())
    assert (reverse["rollouts"], reverse["scored"], guess["scored"]) == (32, 32, 4)
    # The policy as it is shipped, sampled: 0.3 to 0.45 in the demo.
    assert 0.2 < reverse["mean_reward"] < 0.6
    rollouts = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["ending"] for r in rollouts} <= {"completed", "truncated"}
    assert all(r["prompt_tokens"] > 5 and r["sampled_tokens"] > 0 for r in rollouts)
    assert max(r["turns"] for r in rollouts) > 1
