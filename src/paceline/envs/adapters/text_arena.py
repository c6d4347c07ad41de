"""TextArena's games (github.com/LeonGuertler/TextArena): alone, against a service, or against each other.

    [[env]]
    id = "textarena"
    args = { game = "GuessTheNumber-v0", template = "[{}]" }

Games draw from Python's global `random`: each is seeded, made and reset in one go, and what it draws later may come
out differently when many run at once. Where that matters, give it workers with `rollouts = 1`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.adapters import needed
from paceline.envs.group_env import MultiAgentEnv, Seat
from paceline.envs.protocol import Context, EndlessTasks, Environment, Model, Result, TaskSource
from paceline.errors import ConfigError, EnvError

_GAME: Final = -1
"""Who speaks when the game does."""

_SEEDING = threading.Lock()


class Game:
    """One game, step by step."""

    def __init__(self, name: str, players: int, seed: int, options: Mapping[str, Any]) -> None:
        arena = needed("textarena", "textarena")
        # The raw game: what is new since a player's last turn. The wrapped one says everything again each time, and no
        # prompt would extend the one before.
        raw = name if name.endswith("-raw") else f"{name}-raw"
        with _SEEDING:
            random.seed(seed)
            try:
                self._env = arena.make(raw, **options)
                self._env.reset(num_players=players, seed=seed)
            except Exception as error:  # an unknown game, the wrong number of players, data that is not there
                raise EnvError(f"textarena game {name!r} for {players} cannot be set up: {error}") from error
        self.is_over = False
        self.turns = 0

    def ask(self) -> tuple[int, str]:
        """Whose turn it is, and what that player is told."""
        player, observations = self._env.get_observation()
        told = [text for sender, text, *_ in observations if sender != player]
        return int(player), "\n".join(str(text) for text in told).strip() or "Your turn."

    def act(self, action: str) -> None:
        self.turns += 1
        done, _ = self._env.step(action)
        self.is_over = bool(done)

    def rewards(self) -> dict[int, float]:
        """By player; empty before the end."""
        rewards, _ = self._env.close()
        return {int(player): float(reward) for player, reward in (rewards or {}).items()}


class TextArena(Environment):
    """The policy plays as player 0; others are services of the run."""

    def __init__(
        self,
        game: str,
        players: int = 1,
        opponent: str = "opponent",
        template: str = "{}",
        rules: str | None = None,
        seed: int = 0,
        options: Mapping[str, Any] = {},
    ) -> None:
        """`template` makes an action of what the model says, `"[{}]"` for games that want brackets. `rules` is said
        first instead of the game's own words, for models with a short context. `opponent`: the
        service (`[services]` or `[chat.NAME]`) that plays the others; it is asked with the messages so far."""
        self._make = (game, players, options)
        self._opponent, self._template, self._rules, self._seed = opponent, template, rules, seed
        try:
            Game(game, players, 0, options)
        except EnvError as error:
            raise ConfigError(str(error)) from error

    def tasks(self, split: Split) -> TaskSource:
        offset = self._seed * 2_000_003 + (0 if split == "train" else 1_000_003)
        game, players, options = self._make
        return EndlessTasks(
            lambda index: offset + index, f"textarena/{game}/{players}/{sorted(options.items())}/{offset}"
        )

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        name, players, options = self._make
        game = ctx.state = Game(name, players, task.data, options)
        theirs: dict[int, list[dict[str, str]]] = {}
        while not game.is_over:
            player, told = game.ask()
            if player == 0:
                if self._rules is not None and model.last is None:
                    told = self._rules
                reply = await model.chat(told)
                game.act(self._template.format(reply.text.strip()))
                continue
            said = theirs.setdefault(player, [])
            said.append({"role": "user", "content": told})
            answer = str(await self.ask(self._opponent, said))
            said.append({"role": "assistant", "content": answer})
            game.act(answer)
        return _result(game, 0)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        return _result(ctx.state, 0) if isinstance(ctx.state, Game) and ctx.state.is_over else None


class TextArenaSelfPlay(MultiAgentEnv):
    """Two players, both the policy: each is a rollout of its own, compared with those of its seat."""

    roles: Sequence[str] = ("player_0", "player_1")

    def __init__(
        self, game: str, template: str = "{}", seed: int = 0, options: Mapping[str, Any] = {}
    ) -> None:
        self._alone = TextArena(game, 2, "", template, None, seed, options)
        self._game, self._template, self._options = game, template, options

    def tasks(self, split: Split) -> TaskSource:
        return self._alone.tasks(split)

    async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Mapping[str, Result]:
        game = Game(self._game, 2, task.data, self._options)
        while not game.is_over:
            player, told = game.ask()
            reply = await seats[f"player_{player}"].model.chat(told)
            game.act(self._template.format(reply.text.strip()))
        return {role: _result(game, number) for number, role in enumerate(self.roles)}


def _result(game: Game, player: int) -> Result:
    rewards = game.rewards()
    return Result(rewards.get(player), metrics={"game_turns": float(game.turns)})
