"""The rules of the built-in environments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.envs.builtin import arithmetic, guess_number, reverse_text
from paceline.envs.builtin.draws import Draws, split_of

MODULES = (reverse_text, arithmetic, guess_number)
SPLITS = ("train", "eval")


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("split", SPLITS)
def test_a_task_depends_on_its_key_alone(module, split) -> None:
    forward = [module.make_task(3, i, split) for i in range(50)]
    backward = [module.make_task(3, i, split) for i in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [module.make_task(4, i, split) for i in range(50)]


def test_the_stream_is_the_same_on_every_machine() -> None:
    draws = Draws("a", 1)
    assert [draws.below(1000) for _ in range(4)] == [725, 564, 118, 806]


def test_keys_do_not_run_together() -> None:
    assert Draws("a", 11).below(10**6) != Draws("a1", 1).below(10**6)


@pytest.mark.parametrize("module", [reverse_text, arithmetic])
def test_no_problem_is_in_both_splits(module) -> None:
    train, held_out = (
        {module.prompt(module.make_task(seed, i, split)) for seed in range(3) for i in range(500)}
        for split in SPLITS
    )
    assert not train & held_out
    assert len(held_out) > 50


def test_an_eighth_of_all_problems_is_held_out() -> None:
    share = sum(split_of(str(i)) == "eval" for i in range(8000)) / 8000
    assert 0.11 < share < 0.14


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("fedcba", 1.0),
        (" fedcba\n", 1.0),
        ("fedcbx", 5 / 6),
        ("fedcb", 5 / 6),
        ("fedcbaaaaaaa", 0.5),
        ("", 0.0),
    ],
)
def test_a_reversal_earns_credit_for_what_is_right(response: str, expected: float) -> None:
    assert reverse_text.score(reverse_text.ReverseTextTask("abcdef"), response) == pytest.approx(expected)


@given(st.text(max_size=40))
def test_every_response_scores_between_zero_and_one(response: str) -> None:
    assert 0.0 <= reverse_text.score(reverse_text.make_task(0, 0, "train"), response) <= 1.0
    assert arithmetic.score(arithmetic.make_task(0, 0, "train"), response) in (0.0, 0.1, 1.0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("12", 1.0), (" 12 ", 1.0), ("13", 0.1), ("12.", 0.0), ("5+7=12", 0.0), ("", 0.0), ("٣", 0.0)],
)
def test_arithmetic_is_right_or_wrong(response: str, expected: float) -> None:
    assert arithmetic.score(arithmetic.ArithmeticTask(5, "+", 7), response) == expected


@given(st.integers(0, 10**6))
def test_differences_are_never_negative(index: int) -> None:
    assert arithmetic.make_task(0, index, "train").answer >= 0


@pytest.mark.parametrize("hidden", range(guess_number.LOW, guess_number.HIGH + 1))
def test_halving_finds_every_number_within_four_guesses(hidden: int) -> None:
    game = guess_number.start(guess_number.GuessNumberTask(hidden))
    low, high = guess_number.LOW, guess_number.HIGH
    while not game.is_over:
        guess = (low + high) // 2
        game, reply = guess_number.play(game, str(guess))
        low, high = (guess + 1, high) if reply == "higher" else (low, guess - 1)
    assert game.is_won
    assert game.guesses <= 4
    assert guess_number.score(game) == pytest.approx(1 - 0.1 * (game.guesses - 1))


@pytest.mark.parametrize("response", ["", "eight", "0", "16", "8!", "-3", "1 2", "²"])
def test_a_malformed_guess_costs_a_guess_and_is_answered(response: str) -> None:
    game, reply = guess_number.play(guess_number.Game(hidden=8), response)
    assert (game.guesses, game.is_won, reply) == (1, False, "say a number")


def test_a_game_that_is_not_won_ends_at_the_last_guess_and_scores_nothing() -> None:
    game = guess_number.Game(hidden=8)
    for _ in range(guess_number.MAX_GUESSES):
        assert not game.is_over
        game, _ = guess_number.play(game, "1")
    assert game.is_over
    assert guess_number.score(game) == 0.0


@given(st.integers(1, 15), st.integers(1, 15))
def test_feedback_points_at_the_hidden_number(hidden: int, guess: int) -> None:
    expected = "correct" if hidden == guess else "higher" if hidden > guess else "lower"
    assert guess_number.feedback(guess_number.GuessNumberTask(hidden), guess) == expected
