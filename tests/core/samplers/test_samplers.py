"""Samplers that learn how tasks go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EnvSection
from paceline.core.samplers import LEARNING, DifficultyPools, SuccessBand, build_sampler
from paceline.core.samplers.base import SumTree
from paceline.core.setup import train_spec
from paceline.errors import ConfigError
from paceline.testing import Script, World, setup_for


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0, 0.999999))
def test_a_sum_tree_finds_what_a_walk_along_the_weights_finds(weights: list[float], point: float) -> None:
    tree = SumTree(len(weights), 1.0)
    for index, weight in enumerate(weights):
        tree[index] = weight
    assert tree.total == pytest.approx(sum(weights))
    if tree.total <= 0:
        return
    found = tree.find(point * tree.total)
    assert weights[found] > 0
    before = sum(weights[:found])
    assert before - 1e-6 <= point * tree.total <= before + weights[found] + 1e-6


def drawn(sampler: object, count: int, first: int = 0) -> Counter[int]:
    return Counter(sampler.draw(n) for n in range(first, first + count))  # type: ignore[attr-defined]


def test_pools_draw_what_is_between_most() -> None:
    sampler = DifficultyPools(30, 0, forget=None)
    for index in range(30):
        sampler.seen(index, (0.0, 0.5, 1.0)[index % 3], 0.1)
    counts = drawn(sampler, 14_000)
    by_pool = [sum(counts[i] for i in range(k, 30, 3)) for k in range(3)]
    assert [n / 14_000 for n in by_pool] == pytest.approx([1 / 7, 5 / 7, 1 / 7], abs=0.02)


def test_a_band_leaves_the_solved_and_the_hopeless_alone() -> None:
    sampler = SuccessBand(20, 1, low=0.2, high=0.8, outside=0.01, forget=None)
    for index in range(20):
        sampler.seen(index, 0.5 if index < 5 else float(index % 2), 0.1)
    counts = drawn(sampler, 4000)
    assert sum(counts[i] for i in range(5)) > 0.95 * 4000


def test_estimates_lean_to_the_newest_and_fade_when_they_are_old() -> None:
    sampler = SuccessBand(4, 0, decay=0.5, forget=2.0)
    sampler.seen(0, 1.0, 0.0)
    sampler.seen(0, 0.0, 0.0)
    assert sampler.estimate(0) == 0.5
    sampler.seen(0, None, None)
    assert sampler.estimate(0) == 0.5
    drawn(sampler, 8, first=1)
    assert sampler.estimate(0) == 0.5
    sampler.draw(9)
    assert sampler.estimate(0) is None


@pytest.mark.parametrize("name", LEARNING)
def test_a_resumed_sampler_draws_what_an_uninterrupted_one_draws(name: str) -> None:
    def fresh() -> object:
        return build_sampler(name, LEARNING[name], 50, 3, {"forget": 1.0})

    whole, before, after = fresh(), fresh(), fresh()
    told = [(n * 7 % 50, (n % 5) / 4) for n in range(200)]
    draws = []
    for n, (index, mean) in enumerate(told):
        draws.append(whole.draw(n))  # type: ignore[attr-defined]
        whole.seen(index, mean, 0.1)  # type: ignore[attr-defined]
    first = []
    for n, (index, mean) in enumerate(told[:90]):
        first.append(before.draw(n))  # type: ignore[attr-defined]
        before.seen(index, mean, 0.1)  # type: ignore[attr-defined]
    after.restore(before.snapshot())  # type: ignore[attr-defined]
    for n, (index, mean) in enumerate(told[90:], 90):
        first.append(after.draw(n))  # type: ignore[attr-defined]
        after.seen(index, mean, 0.1)  # type: ignore[attr-defined]
    assert first == draws


def test_a_draw_does_not_cost_more_with_more_tasks() -> None:
    def seconds(size: int) -> float:
        sampler = SuccessBand(size, 0)
        best = 9.0
        for _ in range(5):
            began = time.process_time()
            for n in range(2000):
                sampler.seen(sampler.draw(n), 0.5, 0.1)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(200_000) < 5 * seconds(200)  # log2: 17.6 against 7.6; a walk over all would be 1,000 times


class Backwards:
    """From the last task to the first: a user's own."""

    def __init__(self, size: int, seed: int, *, step: int = 1) -> None:
        self.size, self.step, self.told = size, step, 0

    def draw(self, number: int) -> int:
        return -1 - number * self.step % self.size + self.size

    def seen(self, index: int, mean: float | None, variance: float | None) -> None:
        self.told += 1

    def snapshot(self) -> dict[str, int]:
        return {"told": self.told}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.told = state["told"]


def test_a_sampler_of_the_users_own_draws_is_told_and_is_in_the_checkpoint() -> None:
    section = EnvSection.model_validate(
        {"id": "e", "name": "env", "sampler": "own:Backwards", "sampler_args": {"step": 2}, "group_size": 2}
    )
    spec = train_spec(section, 9, "", samplers={"env": Backwards})
    setup = setup_for(spec, batch=4, max_steps=6, checkpoint_every=3)
    trace = World(setup, Script(), cap=6).run()
    opened = {c.rollout.group: c.task.index for c in trace.launched}
    assert [opened[group] for group in range(5)] == [8, 6, 4, 2, 0]
    _, state = trace.checkpoints[-1]
    resumed = World(setup, Script(), cap=6, state=state)
    sampler = resumed.core.curriculum.samplers["env"].learning
    assert isinstance(sampler, Backwards)
    assert sampler.told > 0
    with pytest.raises(ConfigError, match="'own:Backwards' refuses its sampler_args"):
        train_spec(
            section.model_copy(update={"sampler_args": {"stride": 2}}), 9, "", samplers={"env": Backwards}
        )


def test_what_cannot_be_is_refused() -> None:
    for name, size, args, says in (
        ("band", None, {}, "endless"),
        ("band", 5, {"lo": 1}, "lo"),
        ("band", 5, {"low": 0.9, "high": 0.1}, "low < high"),
        ("difficulty", 5, {"bounds": [0.5]}, "one weight more"),
        ("difficulty", 5, {"decay": 0}, "decay"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_sampler(name, LEARNING[name], size, 0, args)  # type: ignore[arg-type]
