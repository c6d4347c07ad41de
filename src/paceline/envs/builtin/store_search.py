"""Find a price in a database by asking it: a tool that is a real SQL query, several turns, and better the sooner.

The model is told the range, and every answer that is a number is a call of the tool `compare`, which asks SQLite
whether the price of the article is higher or lower. The game is over when it is found, or after MAX_QUERIES.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from paceline.domain.task import Split
from paceline.envs.builtin.draws import Draws
from paceline.envs.protocol import Context, EndlessTasks, Result, TaskSource
from paceline.envs.tool_env import ToolEnv
from paceline.envs.tools import PlainCalls

LOW, HIGH = 1, 15
"""The price is one of these or between them."""

MAX_QUERIES = 6
"""Queries in a game. An answer that is no number ends it."""

QUERY_COST = 0.1
"""What each query after the first takes off the score of a game that is won."""

_COMPARE = (
    "SELECT CASE WHEN price > ?1 THEN 'higher' WHEN price < ?1 THEN 'lower' ELSE 'correct' END FROM article"
)


class Store:
    """One game: a database with one article in it, and how often it was asked."""

    def __init__(self, price: int) -> None:
        # Tools run in whichever thread is free; never two of one rollout at a time here, for the store has one article.
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE article (name TEXT, price INTEGER)")
        self.database.execute("INSERT INTO article VALUES ('lamp', ?)", (price,))
        self.queries = 0
        self.is_found = False

    @property
    def is_over(self) -> bool:
        return self.is_found or self.queries >= MAX_QUERIES


class StoreSearch(ToolEnv):
    """Find a price by asking a database whether it is higher or lower."""

    replayable = True
    call_format = PlainCalls("compare", "price", r"[0-9]{1,3}")

    def __init__(self, seed: int = 0, wait_s: float = 0.0) -> None:
        """`wait_s`: seconds that the database takes over a query, as a remote one would."""
        if wait_s < 0:
            raise ValueError(f"wait_s is {wait_s}; expected at least 0 seconds")
        self._seed = seed
        self._wait_s = wait_s
        self.tools = (self.compare,)

    def tasks(self, split: Split) -> TaskSource:
        def price(index: int) -> int:
            return Draws("store_search", self._seed, split, index).between(LOW, HIGH)

        return EndlessTasks(price, f"store-search/1/{self._seed}/{split}")

    def prompt(self, data: Any) -> str:
        return f"Guess: {LOW} to {HIGH}"

    def state(self, data: Any, ctx: Context) -> Store:
        return Store(data)

    def is_over(self, state: Store) -> bool:
        return state.is_over

    def compare(self, price: int, state: Store) -> str:
        """Ask the database whether the article's price is higher or lower."""
        state.queries += 1
        if self._wait_s:
            time.sleep(self._wait_s)
        (told,) = state.database.execute(_COMPARE, (price,)).fetchone()
        state.is_found = told == "correct"
        return str(told)

    def score(self, data: Any, state: Store, text: str) -> Result:
        won = float(state.is_found)
        reward = won * (1.0 - QUERY_COST * (state.queries - 1))
        return Result(reward, metrics={"queries": float(state.queries), "won": won})

    def release(self, state: Store) -> None:
        state.database.close()
