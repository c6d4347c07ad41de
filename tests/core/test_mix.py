"""The mix holds its targets on what reaches the trainer, whatever the environments do to it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.mix import Mix, MixTarget
from paceline.core.streams import key, uniform
from paceline.errors import ConfigError


class World(NamedTuple):
    """What an environment does with its groups."""

    seconds: float = 1.0
    dead: float = 0.0
    """Share of groups that bring nothing."""
    loses: float = 0.0
    """Share of rollouts of the others that fail."""
    tokens: int = 100


def trained(
    mix: Mix, worlds: dict[str, World], groups: int, *, size: int = 4, in_flight: int = 16, seed: int = 0
) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of (rollouts or tokens, draws) over the last three quarters of `groups` groups, closed loop."""
    counts, at = key(seed, "world"), 0
    line: list[tuple[float, int, str]] = []
    now = 0.0
    units, draws = dict.fromkeys(worlds, 0.0), dict.fromkeys(worlds, 0)
    names = list(worlds)
    for number in range(groups):
        while len(line) < in_flight:
            point = uniform(key(seed, "draw"), at)
            shares = mix.shares(names)
            assert sum(shares) == pytest.approx(1.0)
            name = next(
                (n for n, upto in zip(names, accumulate(shares), strict=True) if point < upto), names[-1]
            )
            mix.drawn(name)
            if number > groups // 4:
                draws[name] += 1
            heapq.heappush(line, (now + worlds[name].seconds * (0.5 + uniform(counts, 3 * at)), at, name))
            at += 1
        now, which, name = heapq.heappop(line)
        world = worlds[name]
        alive = uniform(counts, 3 * which + 1) >= world.dead
        rollouts = sum(uniform(key(seed, which), n) >= world.loses for n in range(size)) if alive else 0
        mix.returned(name, rollouts, rollouts * world.tokens)
        if number > groups // 4:
            units[name] += rollouts * (world.tokens if mix.by == "tokens" else 1)
    total, drawn = sum(units.values()), sum(draws.values())
    return {n: u / total for n, u in units.items()}, {n: d / drawn for n, d in draws.items()}


def mix_of(by: str, batch: float = 64, **weights: float) -> Mix:
    return Mix([MixTarget(name, weight, 4) for name, weight in weights.items()], by, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "worlds",
    [
        {"a": World(), "b": World()},
        {"a": World(seconds=20.0), "b": World()},
        {"a": World(dead=0.6), "b": World()},
        {"a": World(loses=0.5), "b": World(dead=0.3)},
        {"a": World(seconds=10.0, dead=0.5, loses=0.2), "b": World(seconds=0.5)},
    ],
    ids=["alike", "slow", "no-signal", "failing", "all-of-it"],
)
def test_shares_of_what_is_trained_are_held_under_unequal_speed_failure_and_signal(
    worlds: dict[str, World],
) -> None:
    shares, _ = trained(mix_of("rollouts", a=1, b=1), worlds, 4000)
    assert shares["a"] == pytest.approx(0.5, abs=0.03)


def test_tokens_are_held_where_lengths_differ() -> None:
    worlds = {"a": World(tokens=2000, seconds=8.0), "b": World(tokens=100), "c": World(tokens=300, dead=0.4)}
    mix = mix_of("tokens", batch=20_000, a=1, b=1, c=2)
    shares, draws = trained(mix, worlds, 8000)
    assert [shares[name] for name in "abc"] == pytest.approx([0.25, 0.25, 0.5], abs=0.04)
    assert draws["b"] > 10 * draws["a"]


def test_s13_an_environment_without_signal_is_favoured_and_never_takes_everything() -> None:
    mix = mix_of("rollouts", a=1, b=1)
    for _ in range(10):
        for name, brings in (("a", 0), ("b", 4)):
            mix.drawn(name)
            mix.returned(name, brings, 0)
    a, b = mix.shares(["a", "b"])
    assert 0.5 < a < 1
    assert 0 < b < 0.5
    shares, draws = trained(mix_of("rollouts", a=1, b=1), {"a": World(dead=1.0), "b": World()}, 1000)
    assert draws["a"] == pytest.approx(0.75, abs=0.04)  # its ceiling: half way from its share to all
    assert shares["b"] == 1.0


def test_a_change_in_what_an_environment_brings_is_made_up_for() -> None:
    mix = mix_of("rollouts", a=1, b=1)
    trained(mix, {"a": World(), "b": World()}, 1000)
    shares, _ = trained(mix, {"a": World(dead=0.6), "b": World()}, 3000, seed=1)
    assert shares["a"] == pytest.approx(0.5, abs=0.03)


def test_floors_and_ceilings_of_draws_are_kept() -> None:
    targets = [
        MixTarget("a", 8, 4, floor=0.3, ceiling=0.4),
        MixTarget("b", 1, 4),
        MixTarget("c", 1, 4, floor=0.25),
    ]
    _, draws = trained(Mix(targets, "rollouts", 64), {n: World() for n in "abc"}, 2000)
    assert draws["a"] == pytest.approx(0.4, abs=0.03)
    assert draws["c"] >= 0.22


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 0.2), st.floats(0.4, 1)), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40),
    st.sampled_from(["rollouts", "tokens"]),
)
@settings(max_examples=80)
def test_shares_add_up_and_stay_between_their_bounds(
    bounds: list[tuple[float, float, float]], history: list[tuple[int, int]], by: str
) -> None:
    targets = [MixTarget(str(n), w, 4, f, max(f, c)) for n, (w, f, c) in enumerate(bounds)]
    try:
        mix = Mix(targets, by, 32)  # type: ignore[arg-type]
    except ConfigError:
        return
    names = [target.env for target in targets]
    for which, brings in history:
        name = names[which % len(names)]
        mix.drawn(name)
        mix.returned(name, brings, brings * 50)
    shares = mix.shares(names)
    assert sum(shares) == pytest.approx(1.0)
    for target, share in zip(targets, shares, strict=True):
        assert (target.floor or 0) - 1e-6 <= share <= (target.ceiling or 1) + 1e-6


def test_a_resumed_mix_goes_on_as_it_was() -> None:
    mix, resumed = mix_of("rollouts", a=1, b=3), mix_of("rollouts", a=1, b=3)
    trained(mix, {"a": World(dead=0.5), "b": World()}, 200)
    while any(env.under_way for env in mix._envs.values()):
        for name in "ab":
            mix.returned(name, 2, 0)
    resumed.restore(mix.snapshot())
    assert resumed.shares(["a", "b"]) == mix.shares(["a", "b"])


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


def test_bounds_that_cannot_be_are_refused() -> None:
    def of(**bounds: float) -> Callable[[], object]:
        return lambda: Mix([MixTarget(n, 1, 4, **bounds) for n in "ab"], "rollouts", 8)  # type: ignore[arg-type]

    assert "floors add up to 1.2" in refusal(of(floor=0.6, ceiling=0.9))
    assert "ceilings add up to 0.8" in refusal(of(ceiling=0.4))
