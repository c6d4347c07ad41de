"""Guess a hidden number from "higher" and "lower": several turns, and better the sooner it is found.

Halving what is left finds any of the 15 numbers within four guesses, which scores 0.77 on average. Only
fifteen secrets exist, so the splits share them; what is held out is the stream they are drawn from.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from paceline.envs.builtin.draws import Draws, Split

LOW, HIGH = 1, 15
"""The hidden number is one of these or between them."""

MAX_GUESSES = 6
"""Guesses in a game, malformed ones included."""

GUESS_COST = 0.1
"""What each guess after the first takes off the score of a game that is won."""

SAY_A_NUMBER = "say a number"
"""The observation after a guess that is no number in range."""

Feedback = Literal["higher", "lower", "correct"]

_NUMBER = re.compile(r"[0-9]{1,3}")


class GuessNumberTask(msgspec.Struct, frozen=True):
    hidden: int


class Game(msgspec.Struct, frozen=True):
    """A game so far. `play` returns the next one; nothing changes in place."""

    hidden: int
    guesses: int = 0
    """Guesses made, malformed ones included."""
    is_won: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_won or self.guesses >= MAX_GUESSES


def make_task(seed: int, index: int, split: Split) -> GuessNumberTask:
    """Task `index` of the endless stream that `seed` and `split` name."""
    return GuessNumberTask(Draws("guess_number", seed, split, index).between(LOW, HIGH))


def prompt(task: GuessNumberTask) -> str:
    """What the user says first. It does not depend on the hidden number."""
    return f"Guess: {LOW} to {HIGH}"


def parse_guess(response: str) -> int | None:
    """The number a response consists of; None if it is anything else or out of range."""
    stripped = response.strip()
    if not _NUMBER.fullmatch(stripped):
        return None
    guess = int(stripped)
    return guess if LOW <= guess <= HIGH else None


def feedback(task: GuessNumberTask, guess: int) -> Feedback:
    """Where the hidden number lies, seen from `guess`."""
    return _feedback(task.hidden, guess)


def start(task: GuessNumberTask) -> Game:
    return Game(task.hidden)


def play(game: Game, response: str) -> tuple[Game, str]:
    """The game after one more response, and what the user says to it."""
    guess = parse_guess(response)
    if guess is None:
        return Game(game.hidden, game.guesses + 1), SAY_A_NUMBER
    reply = _feedback(game.hidden, guess)
    return Game(game.hidden, game.guesses + 1, is_won=reply == "correct"), reply


def score(game: Game) -> float:
    """1 for a number found at once, GUESS_COST less for each further guess; 0 for one not found."""
    return 1.0 - GUESS_COST * (game.guesses - 1) if game.is_won else 0.0


def _feedback(hidden: int, guess: int) -> Feedback:
    if guess == hidden:
        return "correct"
    return "higher" if hidden > guess else "lower"
