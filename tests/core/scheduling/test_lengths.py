"""The length predictor: what it learns, that what was cut off is not forgotten, and that it knows how good it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.scheduling.lengths import WINDOW, EnvLengths, Prediction, hazard_of


def draw(
    seed: int, groups: int, size: int, *, mean: float = 6.5, between: float = 0.6, within: float = 0.3
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    effects = rng.normal(0, math.sqrt(between), (groups, 1))
    return np.exp(mean + effects + rng.normal(0, math.sqrt(within), (groups, size)))


def taught(lengths: np.ndarray, cut: float = math.inf) -> EnvLengths:
    env = EnvLengths()
    for group, row in enumerate(lengths):
        for member, tokens in enumerate(row):
            if tokens > cut:
                env.cut_off(group, member, int(cut))
            else:
                env.end(group, member, int(tokens), is_runaway=False)
    return env


def test_it_finds_the_variance_between_groups_and_within() -> None:
    env = taught(draw(1, 180, 8))
    env.fit()
    assert env.mean == pytest.approx(6.5, abs=0.2)
    assert env.between == pytest.approx(0.6, rel=0.3)
    assert env.within == pytest.approx(0.3, rel=0.15)


def test_what_was_cut_off_is_known_to_be_longer() -> None:
    lengths = draw(2, 180, 8)
    cut = float(np.quantile(lengths, 0.8))
    env = taught(lengths, cut)
    for _ in range(10):
        env.fit()
    naive = float(np.log(lengths[lengths <= cut]).mean())
    assert naive < 6.5 - 0.25
    assert env.mean == pytest.approx(6.5, abs=0.15)
    assert env.predict().beyond(cut) == pytest.approx(0.2, abs=0.04)


def test_what_comes_back_after_its_siblings_are_forgotten_does_not_make_all_look_long() -> None:
    lengths = draw(2, 400, 8)
    cut = float(np.quantile(lengths, 0.9))
    env = taught(lengths, cut)
    before = env.predict()
    late = [(group, member) for group, row in enumerate(lengths) for member, n in enumerate(row) if n > cut]
    ended = env.ended
    for group, member in late:
        env.end(group, member, int(lengths[group, member]), is_runaway=False, returns=True)
    env.fit()
    after = env.predict()
    assert env.ended == ended + len(late)
    assert env.limit == int(lengths.max())
    # Those that are remembered are known exactly now, instead of by their beginning.
    assert after.beyond(cut) == pytest.approx(before.beyond(cut), abs=0.03)
    assert after.mean == pytest.approx(before.mean, abs=0.1)


def test_siblings_narrow_and_move_the_prediction() -> None:
    env = taught(draw(3, 120, 8))
    before = env.predict(10_000)
    for member in range(3):
        env.end(10_000, member, 5000, is_runaway=False)
    after = env.predict(10_000)
    n, b, w = 3, env.between, env.within
    expected = env.mean + n * b / (n * b + w) * (math.log(5000) - env.mean)
    assert after.mean == pytest.approx(expected, abs=1e-6)
    assert after.deviation < before.deviation
    env.running(10_001, 0, 20_000)  # one that runs says as much: its group is long
    assert env.predict(10_001).mean > env.mean + 0.5


def test_it_knows_how_good_it_is() -> None:
    env = taught(draw(4, 150, 8))
    found = env.calibration
    assert found.judged > 1000
    assert found.inside_half / found.judged == pytest.approx(0.5, abs=0.06)
    assert found.inside_90 / found.judged == pytest.approx(0.9, abs=0.04)
    assert found.ranks / found.judged == pytest.approx(0.5, abs=0.04)
    note = env.note("env")
    assert note.inside_half == found.inside_half / found.judged
    assert note.median == pytest.approx(math.exp(6.5), rel=0.2)


def test_runaways_are_a_share_and_not_a_tail() -> None:
    env = EnvLengths()
    for group, row in enumerate(draw(5, 100, 8, between=0.1, within=0.1)):
        for member, tokens in enumerate(row):
            runs = (group + member) % 20 == 0
            env.end(group, member, 16_384 if runs else int(tokens), is_runaway=runs)
    predicted = env.predict()
    assert predicted.runaway == pytest.approx(0.05, abs=0.01)
    assert predicted.beyond(10_000) == pytest.approx(predicted.runaway, rel=0.02)
    assert env.within == pytest.approx(0.1, rel=0.2)
    assert predicted.expected(8_000) > 16_000  # what has come so far is a runaway


@pytest.mark.parametrize("have", [0.0, 100.0, 700.0, 5_000.0])
def test_what_remains_is_the_mean_of_what_is_longer(have: float) -> None:
    predicted = Prediction(6.5, 0.8, 0.0, 1e6)
    sample = np.exp(np.random.default_rng(6).normal(6.5, 0.8, 400_000))
    assert predicted.expected(have) == pytest.approx(sample[sample > have].mean(), rel=0.03)
    assert predicted.beyond(max(have, 1.0)) == pytest.approx((sample > max(have, 1.0)).mean(), abs=0.005)
    assert predicted.quantile(0.9) == pytest.approx(np.quantile(sample, 0.9), rel=0.02)


def test_the_hazard_is_finite_far_out() -> None:
    values = [hazard_of(z) for z in (-5.0, 0.0, 5.0, 7.99, 8.01, 20.0, 1e3)]
    assert values == sorted(values)
    assert hazard_of(0.0) == pytest.approx(math.sqrt(2 / math.pi))
    assert hazard_of(8.01) == pytest.approx(8.01 + 1 / 8.01, rel=1e-3)


def test_groups_that_were_open_for_long_are_forgotten_when_they_have_closed() -> None:
    lengths = EnvLengths()
    for group in range(1000):
        lengths.opened(group)
        lengths.end(group, 0, 100 + group % 7, is_runaway=False)
    assert len(lengths._groups) == 1000
    for group in range(1000):
        lengths.closed(group)
    for group in range(1000, 1003):
        lengths.opened(group)
        lengths.end(group, 0, 100, is_runaway=False)
    # The latest that closed, and those that are open.
    assert sorted(lengths._groups) == list(range(1000 - WINDOW, 1003))
    lengths.opened(999)
    for group in range(1000, 1500):
        lengths.end(group, 0, 100, is_runaway=False)
        lengths.closed(group)
    assert 999 in lengths._groups


def test_it_goes_on_from_a_snapshot() -> None:
    env = taught(draw(7, 60, 8))
    again = EnvLengths()
    again.restore(env.snapshot())
    assert again.predict() == env.predict()


def test_what_few_pass_is_what_few_pass() -> None:
    lengths = draw(5, 20_000, 1).ravel()
    prediction = Prediction(6.5, math.sqrt(0.9), runaway=0.02, limit=float(lengths.max()), is_limited=False)
    for have in (0.0, 300.0, 2000.0):
        longer = lengths[lengths > have]
        for share in (0.5, 0.05):
            passed = prediction.passed_by(share, have)
            assert passed > have
            assert float((longer > passed).mean()) == pytest.approx(share, rel=0.2)


def test_the_longest_seen_is_no_limit_until_something_was_cut_there() -> None:
    # All began together: what still runs is longer than all that has ended, and has hardly begun.
    env = EnvLengths()
    for group in range(60):
        env.end(group, 0, 100 + 10 * group, is_runaway=False)
    env.fit()
    assert env.predict().expected(1000) > 1000
    assert env.predict().passed_by(0.05, 1000) > env.predict().expected(1000)
    env.end(99, 0, 4000, is_runaway=True)
    env.fit()
    # A runaway was seen: what is that much longer than the others is one, most likely, and goes to its limit.
    assert env.predict().passed_by(0.05, 2500) == 4000
    assert env.predict().expected(2500) == pytest.approx(4000, rel=0.05)
    assert env.predict().passed_by(0.05, 5000) == 5000
