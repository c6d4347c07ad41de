"""The tool example on a real vLLM: what waits on the tool occupies no engine, and the report tells the two apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_kit import ROOT, Server, run_to_end

from paceline.journal import read_rollouts

EXAMPLE = ROOT / "examples" / "store-search" / "vllm.toml"
STEPS, WAIT_S = 8, 0.1


@pytest.mark.timeout(900)
async def test_the_tool_example_trains_on_vllm_and_its_report_tells_tool_waits_from_engine_time(
    server: Server, tmp_path: Path
) -> None:
    words = [f"--engine.urls=[{json.dumps(server.url)}]", f"--run.dir={tmp_path}", "--run.name=t"]
    words += [f"--run.max_steps={STEPS}", "--eval=[]", f"--env.0.args={{wait_s = {WAIT_S}}}"]
    words += ["--plain", "--summary=json"]
    out = await run_to_end(EXAMPLE, *words)
    summary = json.loads(out.splitlines()[-1])
    assert (summary["status"], summary["steps"], summary["tokens_conserved"]) == ("done", STEPS, True)

    done = [r for r in read_rollouts(tmp_path / "t") if r.outcome.ending == "completed"]
    asked = [r for r in done if r.metrics["tool_calls"]]
    assert len(asked) >= STEPS * 64
    # Upward: 0.38 in the first half and 0.46 in the second where this was written, give or take 0.02.
    half = len(done) // 2
    first, last = (sum(r.reward or 0.0 for r in some) / half for some in (done[:half], done[-half:]))
    assert last > first + 0.02, (first, last)
    for rollout in asked:
        # The first answer to a question, and each after a tool has spoken, goes on from the exact ids.
        assert all(turn.extends for turn in rollout.turns[1:])
        answered = (
            rollout.metrics["tool_calls"] - rollout.metrics["tool_errors"]
        )  # a call may be refused at once
        assert rollout.env_s > 0.9 * WAIT_S * answered
        assert 0 < rollout.model_s < rollout.ended - rollout.started - rollout.env_s + 0.05
    report = (tmp_path / "t" / "report.html").read_text()
    data = json.loads(
        report.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    )
    env_s, model_s = (data["series"][f"train/all/{name}"] for name in ("env_s", "model_s"))
    assert len(env_s) == len(model_s) == STEPS
    assert all(value > 0.5 * WAIT_S for value in env_s)
    assert all(value > 0 for value in model_s)
