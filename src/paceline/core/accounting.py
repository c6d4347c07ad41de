"""Where every token and every rollout went.

Conservation: what was sampled is in exactly one place. `check` compares the sum of the places with totals that are
counted separately, where tokens are sampled and rollouts launched; a difference is our own bug and stops the run.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from paceline.domain.group import Fate
from paceline.domain.ids import EnvName
from paceline.domain.task import Split
from paceline.errors import InvariantError

Place: TypeAlias = Literal["in_flight", "grouped"] | Fate
"""`in_flight`: running. `grouped`: ended, but its group has not been processed. The rest are fates."""

Stream: TypeAlias = tuple[Split, EnvName]


class StreamAccount:
    """One environment's account. Counts are of sampled tokens; prompt tokens are the engines' business."""

    __slots__ = ("launched", "rollouts", "sampled", "tokens")

    def __init__(self) -> None:
        self.launched = 0
        self.sampled = 0
        self.rollouts: dict[str, int] = {"in_flight": 0}
        self.tokens: dict[str, int] = {"in_flight": 0}

    def move(self, source: Place, target: Place, tokens: int, rollouts: int = 1) -> None:
        """Take tokens (and the rollouts they belong to) from one place to another."""
        counts = self.rollouts
        counts[source] -= rollouts
        counts[target] = counts.get(target, 0) + rollouts
        amounts = self.tokens
        amounts[source] -= tokens
        amounts[target] = amounts.get(target, 0) + tokens


class Account:
    """The accounts of all environments, train and eval."""

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        self._streams: dict[Stream, StreamAccount] = {}

    def of(self, split: Split, env: EnvName) -> StreamAccount:
        """The account of one environment, opened when first asked for."""
        account = self._streams.get((split, env))
        if account is None:
            account = self._streams[split, env] = StreamAccount()
        return account

    def launched(self, account: StreamAccount) -> None:
        account.launched += 1
        account.rollouts["in_flight"] += 1

    def sampled(self, account: StreamAccount, tokens: int) -> None:
        account.sampled += tokens
        account.tokens["in_flight"] += tokens

    def check(self) -> None:
        """InvariantError unless everything sampled and launched is in exactly one place, none negative."""
        for (split, env), account in self._streams.items():
            for what, total, places in (
                ("tokens", account.sampled, account.tokens),
                ("rollouts", account.launched, account.rollouts),
            ):
                if sum(places.values()) != total or min(places.values()) < 0:
                    raise InvariantError(
                        f"{split} env {env!r}: {total} {what} counted at their source, "
                        f"{sum(places.values())} found in their places: {places}"
                    )

    def streams(self) -> dict[Stream, StreamAccount]:
        """The accounts by environment."""
        return dict(self._streams)

    def snapshot(self) -> list[Any]:
        """State to resume from."""
        return [
            [split, env, account.launched, account.sampled, dict(account.rollouts), dict(account.tokens)]
            for (split, env), account in self._streams.items()
        ]

    def give_up(self) -> None:
        """What was under way is lost: it counts as cancelled."""
        for account in self._streams.values():
            for places in (account.tokens, account.rollouts):
                lost = places.pop("in_flight", 0) + places.pop("grouped", 0)
                places["cancelled"] = places.get("cancelled", 0) + lost
                places["in_flight"] = 0

    def restore(self, rows: list[Any]) -> None:
        for split, env, launched, sampled, rollouts, tokens in rows:
            account = self.of(split, env)
            account.launched, account.sampled = launched, sampled
            account.rollouts, account.tokens = dict(rollouts), dict(tokens)
