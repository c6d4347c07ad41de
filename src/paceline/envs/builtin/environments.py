"""The built-in environments: the rules of their modules, in the protocol's form."""

from __future__ import annotations

from typing import Any

from paceline.domain.task import Split
from paceline.envs.builtin import arithmetic, guess_number, reverse_text
from paceline.envs.builtin.guess_number import Game
from paceline.envs.protocol import Context, EndlessTasks, MultiTurnEnv, Observation, SingleTurnEnv, TaskSource


class ReverseText(SingleTurnEnv):
    """Reverse a short string; partial credit."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def tasks(self, split: Split) -> TaskSource:
        return EndlessTasks(
            lambda index: reverse_text.make_task(self._seed, index, split),
            f"reverse-text/1/{self._seed}/{split}",
        )

    def prompt(self, data: Any) -> str:
        return reverse_text.prompt(data)

    def score(self, data: Any, text: str) -> float:
        return reverse_text.score(data, text)


class Arithmetic(SingleTurnEnv):
    """Add or subtract two small numbers; right or wrong."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def tasks(self, split: Split) -> TaskSource:
        return EndlessTasks(
            lambda index: arithmetic.make_task(self._seed, index, split),
            f"arithmetic/1/{arithmetic.LARGEST}/{self._seed}/{split}",
        )

    def prompt(self, data: Any) -> str:
        return arithmetic.prompt(data)

    def score(self, data: Any, text: str) -> float:
        return arithmetic.score(data, text)


class GuessNumber(MultiTurnEnv[Game]):
    """Guess a hidden number from "higher" and "lower"; better the sooner it is found."""

    replayable = True

    def __init__(self, seed: int = 0, wait_s: float = 0.0) -> None:
        """`wait_s`: seconds before each answer to a guess, as if a slow tool were asked."""
        if wait_s < 0:
            raise ValueError(f"wait_s is {wait_s}; expected at least 0 seconds")
        self._seed = seed
        self._wait_s = wait_s

    def tasks(self, split: Split) -> TaskSource:
        return EndlessTasks(
            lambda index: guess_number.make_task(self._seed, index, split),
            f"guess-number/1/{self._seed}/{split}",
        )

    def start(self, data: Any, ctx: Context) -> tuple[Game, str]:
        return guess_number.start(data), guess_number.prompt(data)

    def step(self, state: Game, text: str) -> Observation:
        game, says = guess_number.play(state, text)
        if not game.is_over:
            return Observation(says, state=game)
        metrics = {"guesses": float(game.guesses), "won": float(game.is_won)}
        return Observation(says, done=True, reward=guess_number.score(game), state=game, metrics=metrics)

    async def between(self, state: Game, ctx: Context) -> None:
        if self._wait_s:
            await ctx.sleep(self._wait_s)
