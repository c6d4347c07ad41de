"""The claim of `docs/scheduling.md`, measured: the gradient of a bandit whose reward depends on the length of its answers,
as the samples that each policy ships estimate it, against the true one."""

from __future__ import annotations

from itertools import pairwise
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


def drawn(policy: NDArray[np.float64], noise: int) -> int:
    """The action that this noise makes of a policy."""
    return int(np.searchsorted(np.cumsum(policy), uniform(noise, 0) * policy.sum()))


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
        return drawn(ACTIONS, self.noise[rollout])

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


# ── what the theorem does not cover: the policy moves between the cut-off and the return ──


def moved(version: int, drift: float) -> NDArray[np.float64]:
    """The policy at a version, whose logits move towards what is rewarded, as in training."""
    weights = ACTIONS * np.exp(drift * version * REWARD)
    policy: NDArray[np.float64] = weights / weights.sum()
    return policy


class Drifting(Bandit):
    """The same noise does something else when the policy has moved."""

    def __init__(self, drift: float, *, tasks: int, seed: int = 0) -> None:
        self.drift = drift
        self.versions: dict[RolloutId, int] = {}
        super().__init__(UnbiasedTail(9, "pinned"), tasks=tasks, seed=seed)

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        self.versions[command.rollout] = command.version
        super()._do_StartRollout(command)

    def action(self, rollout: RolloutId) -> int:
        return drawn(moved(self.versions[rollout], self.drift), self.noise[rollout])


class Selection(NamedTuple):
    error: float
    """Length of the gradient's error, by that of the gradient."""
    on_time: float
    """Share of the late that would be on time when they come back."""
    step: float
    """Length by which the gradient moves in a step, by that of the gradient: what one step of staleness costs."""


def selection(drift: float, *, tasks: int = 400) -> Selection:
    """What each late response contributes when it comes back, against what it would have contributed at the version that
    put it off: with the same noise, so that all but the drift cancels."""
    world = Drifting(drift, tasks=tasks)
    trace = world.run(events=10**7)
    assert trace.finish is not None
    assert trace.finish.status == "done"
    puts = {c.number: c for _, _, cs in trace.journal for c in cs if isinstance(c, do.PutOff)}
    first = {c.rollout: puts[c.put_off].again[c.rollout.member] for c in trace.launched if c.put_off}

    def contribution(version: int, noise: int) -> NDArray[np.float64]:
        policy = moved(version, drift)
        action = drawn(policy, noise)
        score = -policy
        score[action] += 1
        found: NDArray[np.float64] = (REWARD[action] - policy @ REWARD) * score
        return found

    trained = [sample.rollout for batch in trace.batches for sample in batch.samples]
    error, gradient, step = np.zeros(len(TOKENS)), np.zeros(len(TOKENS)), []
    short = late = 0
    for rollout in trained:
        version, noise = world.versions[rollout], world.noise[rollout]
        gradient += contribution(version, noise)
        if rollout in first:
            assert noise == world.noise[first[rollout]]
            error += contribution(version, noise) - contribution(world.versions[first[rollout]], noise)
            late += 1
            short += TOKENS[world.action(rollout)] <= 9
    true = [moved(v, drift) * (REWARD - moved(v, drift) @ REWARD) for v in range(len(trace.batches))]
    step = [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in pairwise(true)]
    size = float(np.linalg.norm(gradient))
    return Selection(float(np.linalg.norm(error)) / size, short / late, float(np.mean(step)))


def test_without_drift_what_comes_back_is_what_was_put_off() -> None:
    found = selection(0.0)
    assert found.error == 0.0
    assert found.on_time == 0.0


@pytest.mark.parametrize("drift", [0.01, 0.04, -0.04])
def test_the_error_of_selection_under_drift_is_that_of_a_few_steps_of_staleness(drift: float) -> None:
    found = selection(drift)
    assert 0 < found.error < 6 * found.step
    assert found.on_time < 0.2
