"""A game on a real OpenEnv server: `python openenv_server.py PORT`, with an interpreter that has openenv."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Game(Environment):
    """Find a number from 1 to 15; the seed decides which."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden = self.guesses = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self.hidden, self.guesses = 1 + (seed or 0) % 15, 0
        return Hint(hint="Guess: 1 to 15", done=False, reward=0.0)

    def step(self, action: Guess, **more: Any) -> Hint:
        self.guesses += 1
        said = int(action.message) if action.message.isdecimal() else 0
        if said == self.hidden:
            return Hint(hint="correct", done=True, reward=1.0 / self.guesses)
        return Hint(hint="higher" if said < self.hidden else "lower", done=self.guesses >= 4, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
