"""A few conversations worth reading: the first of the run, and the best and the worst of its last rollouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from paceline.domain.events import RolloutEnded
from paceline.domain.rollout import Rollout
from paceline.observe.fold import Fold, Handler

_CUT = 4000  # characters of one message kept: a report is for reading
_MESSAGES = 40


class Conversation(msgspec.Struct, frozen=True):
    """One rollout, for people. All text in it is untrusted."""

    label: str
    rollout: str
    env: str
    split: str
    ending: str
    cause: str | None
    reward: float | None
    version: int | None
    messages: tuple[tuple[str, str], ...]
    """Role and text, long ones cut."""


class Conversations(Fold):
    """Picks rollouts: the first of every environment and split that was scored, the best and worst of the last.

    A journal keeps messages apart from its events: fetch the picked rollouts whole to show them.
    """

    def __init__(self, recent: int = 48) -> None:
        self._recent = recent
        self._first: dict[tuple[str, str], Rollout] = {}
        self._last: dict[tuple[str, str], deque[Rollout]] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {RolloutEnded: self._ended}

    def _ended(self, at: float, event: RolloutEnded) -> None:
        rollout = event.rollout
        if rollout.reward is None:
            return
        key = (rollout.task.env, rollout.task.split)
        self._first.setdefault(key, rollout)
        self._last.setdefault(key, deque(maxlen=self._recent)).append(rollout)

    def picks(self) -> list[tuple[str, Rollout]]:
        """Train before eval, by environment; each with why it was picked."""
        picks = []
        for key in sorted(self._first, key=lambda key: (key[1] != "train", key[0])):
            last = sorted(self._last[key], key=lambda rollout: rollout.reward or 0.0)
            seen = set()
            for label, rollout in (
                ("first of the run", self._first[key]),
                ("best of the last", last[-1]),
                ("worst of the last", last[0]),
            ):
                if rollout.id not in seen:
                    seen.add(rollout.id)
                    picks.append((label, rollout))
        return picks


def conversation(label: str, rollout: Rollout) -> Conversation:
    """The readable part of a rollout."""
    messages = rollout.messages
    shown = [(message.role, _shorten(message.content)) for message in messages[:_MESSAGES]]
    if len(messages) > _MESSAGES:
        shown.append(("", f"… {len(messages) - _MESSAGES} more messages"))
    return Conversation(
        label=label,
        rollout=str(rollout.id),
        env=rollout.task.env,
        split=rollout.task.split,
        ending=rollout.outcome.ending,
        cause=rollout.outcome.cause,
        reward=rollout.reward,
        version=rollout.newest_version,
        messages=tuple(shown),
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[:_CUT]}… ({len(text) - _CUT} more characters)"
