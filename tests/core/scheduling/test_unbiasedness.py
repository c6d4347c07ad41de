"""The claim of `docs/scheduling.md`, measured: the gradient of a bandit whose reward depends on the length of its answers,
as the samples that each policy ships estimate it, against the true one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from policies import Kind, setup_of

from paceline.core.advantages import builtin
from paceline.core.scheduling import Scheduling, Synchronous, TailRounds, UnbiasedTail
from paceline.core.streams import uniform
from paceline.domain import commands as do
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.testing import Plan, Script, World, train_env

ACTIONS = np.array([0.35, 0.3, 0.2, 0.1, 0.05])
"""What the policy does, with which probability; it never changes."""
TOKENS = (2, 4, 8, 16, 40)
REWARD = np.array([0.1, 0.0, 0.3, 0.6, 1.0])
TRUE = ACTIONS * (REWARD - ACTIONS @ REWARD)
"""E[reward · score] of a softmax policy in its logits."""


class Measured(NamedTuple):
    gradient: NDArray[np.float64]
    error: NDArray[np.float64]
    """Standard error, over tasks."""
    mean_length: float

    @property
    def deviations(self) -> NDArray[np.float64]:
        """Standard errors between what was measured and the truth."""
        found: NDArray[np.float64] = (self.gradient - TRUE) / self.error
        return found


class Bandit(World):
    def __init__(self, policy: Scheduling, *, tasks: int, seed: int, max_staleness: int = 0) -> None:
        self.noise: dict[RolloutId, int] = {}
        spec = train_env(group_size=8, tasks=tasks, epochs=1)
        kind = Kind(lambda: policy, max_staleness=max_staleness)
        setup = setup_of(kind, envs=(spec,), batch=64, max_steps=10**6, seq_len=512, seed=seed)
        script = Script(plan=self.plan, train_s=lambda _: 1.0, cancel_s=lambda _: 0.0)
        super().__init__(setup, script, cap=256, scheduling=policy, algorithm=builtin("rloo", {}))

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        self.noise[command.rollout] = command.noise_seed
        super()._do_StartRollout(command)

    def action(self, rollout: RolloutId) -> int:
        return int(np.searchsorted(np.cumsum(ACTIONS), uniform(self.noise[rollout], 0) * ACTIONS.sum()))

    def plan(self, rollout: RolloutId, task: TaskRef) -> Plan:
        action = self.action(rollout)
        luck = 0.2 * (uniform(self.noise[rollout], 1) - 0.5)  # so that no two rewards are equal
        # Engines are not all as fast at every moment: rollouts of one length do not end at one moment.
        pace = 1 + 0.1 * uniform(self.noise[rollout], 2)
        return Plan(((0.0, TOKENS[action] * pace),), TOKENS[action], reward=float(REWARD[action]) + luck)


def measured(policy: Scheduling, *, tasks: int = 500, seed: int = 0, max_staleness: int = 0) -> Measured:
    world = Bandit(policy, tasks=tasks, seed=seed, max_staleness=max_staleness)
    trace = world.run(events=10**7)
    assert trace.finish is not None
    assert trace.finish.status == "done"
    sums = np.zeros((tasks, len(TOKENS)))
    counts = np.zeros(tasks)
    lengths = []
    for batch in trace.batches:
        for sample in batch.samples:
            score = -ACTIONS.copy()
            score[world.action(sample.rollout)] += 1
            sums[sample.task_index] += float(sample.advantage) * score
            counts[sample.task_index] += 1
            lengths.append(sample.trainable_tokens)
    gradient = sums.sum(0) / counts.sum()
    spread = (sums - counts[:, None] * gradient).std(0)
    return Measured(gradient, spread * np.sqrt(tasks) / counts.sum(), float(np.mean(lengths)))


@pytest.mark.parametrize("how", ["pinned", "resume"])
def test_a_cut_off_with_deferral_estimates_the_true_gradient(how: str) -> None:
    found = measured(UnbiasedTail(9, how), max_staleness=0 if how == "pinned" else 1000)  # type: ignore[arg-type]
    assert np.abs(found.deviations).max() < 3
    assert found.mean_length == pytest.approx(float(ACTIONS @ TOKENS), rel=0.03)


def test_waiting_for_all_estimates_the_true_gradient() -> None:
    assert np.abs(measured(Synchronous()).deviations).max() < 3


def test_the_race_does_not() -> None:
    found = measured(TailRounds(1.25, 1.25))
    assert np.abs(found.deviations).max() > 10
    assert found.mean_length < 0.9 * float(ACTIONS @ TOKENS)
