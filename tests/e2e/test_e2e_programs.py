"""Unmodified programs, each with an SDK or a framework of its own, train on the embedded engine through the gateway."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from e2e_kit import CommandLine, acknowledged, records

from paceline.domain import commands as do
from paceline.journal import read_rollouts

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent-program"

ANTHROPIC = """
import sys
from anthropic import Anthropic

messages = [{"role": "user", "content": f"Reverse: {sys.argv[1]}"}]
for attempt in range(2):
    with Anthropic().messages.stream(model="policy", max_tokens=64, messages=messages) as stream:
        answer = stream.get_final_message()
    messages += [{"role": "assistant", "content": answer.content}, messages[0]]
open("answer.txt", "w").write("".join(block.text for block in answer.content))
"""

PYDANTIC_AI = """
import sys
from pydantic_ai import Agent

agent = Agent("openai-chat:policy", output_type=[str])
asked = f"Reverse: {sys.argv[1]}"
first = agent.run_sync(asked)
again = agent.run_sync(asked, message_history=first.all_messages())
open("answer.txt", "w").write(again.output)
"""

PROGRAMS = """
import sys
from pathlib import Path
from paceline.envs import ListTasks
from reversing import Reversing

AGENTS = ["agent.py", "agent_anthropic.py", "agent_pydantic_ai.py"]

class Programs(Reversing):
    def tasks(self, split):
        return ListTasks([{"agent": agent, "word": word} for word in ("bake", "lomi") for agent in AGENTS])

    def command(self, data, folder):
        return [sys.executable, str(Path(__file__).with_name(data["agent"])), data["word"]]

    def score(self, data, run):
        assert run.exit_code == 0, run.output
        return super().score(data["word"], run)
"""


@pytest.mark.timeout(700)  # each of its rollouts is a process that imports an SDK
def test_unmodified_programs_of_both_sdks_and_a_framework_train_and_every_token_has_its_logprob_and_version(
    tmp_path: Path,
) -> None:
    for module in ("openai", "anthropic", "pydantic_ai"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: training programs of SDKs is NOT covered")
    for name in ("agent.py", "reversing.py"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    (tmp_path / "agent_anthropic.py").write_text(ANTHROPIC)
    (tmp_path / "agent_pydantic_ai.py").write_text(PYDANTIC_AI)
    (tmp_path / "programs.py").write_text(PROGRAMS)
    options = {
        "env.0.id": "programs:Programs",
        "env.0.sampler": "sequential",
        "env.0.group_size": 2,
        "env.0.limits.deadline_s": 500,
        "run.max_steps": 1,
        "batch.rollouts": 6,
        "scheduling.lag": 0,  # the first three tasks, one of each agent, are the batch
        "admission.cap": 6,
        "filters.zero_advantage": False,  # whatever they come to is trained on
    }
    run = CommandLine(tmp_path, **{name.replace(".", "__"): value for name, value in options.items()})
    assert run.end(within_s=600) == 0, run.said
    assert list(acknowledged(run.run_dir)) == [1]
    rollouts = {r.id: r for r in read_rollouts(run.run_dir)}
    for rollout in rollouts.values():
        for turn in rollout.turns:
            assert len(turn.sampled_ids) == len(turn.logprobs) == sum(n for _, n in turn.versions)
            assert sum(n for _, n in turn.roles) == len(turn.prompt_ids)
    (shipped,) = [
        c for record in records(run.run_dir) for c in record.commands if isinstance(c, do.ShipBatch)
    ]
    trained = [rollouts[id] for id in shipped.batch.rollouts]
    assert sorted(r.task.index for r in trained) == [0, 0, 1, 1, 2, 2]
    for rollout in trained:
        assert (rollout.outcome.ending, rollout.reward is not None) == ("completed", True), rollout.outcome
        assert all(turn.extends for turn in rollout.turns[1:])
        assert len(rollout.turns) == 2 or rollout.task.index == 0  # the first agent may be content with one
    assert any(turn.cached_tokens for rollout in trained for turn in rollout.turns[1:])
