"""The trajectory of one rollout: exact ids, turn by turn.

Ids live in one buffer, which grows by doubling; the context of a model call is a read-only view of it. Going on from
an earlier turn than the last fills a buffer of its own with that turn's ids: a copy, and the only cost of a fork. A
call is prepared (`extend` or `prompt`), receives one or more segments, and is then committed as a `Turn`, or
rolled back if it sampled nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EngineId
from paceline.domain.rollout import Finish, Turn, VersionRuns
from paceline.errors import EnvError

if TYPE_CHECKING:
    # A worker's interpreter has no tokenizer library: environments must be importable without one.
    from paceline.tokens.plan import Roles

Ids: TypeAlias = NDArray[np.int32]

_FIRST_CAPACITY = 512

NO_IDS: Ids = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class Recorder:
    """Turns of one rollout. One model call at a time."""

    __slots__ = (
        "_before",
        "_buffer",
        "_cached",
        "_contexts",
        "_extends",
        "_length",
        "_logprobs",
        "_prompt",
        "_roles",
        "_sampled",
        "_tip",
        "_versions",
        "sampled_tokens",
        "turns",
    )

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.sampled_tokens = 0
        """Over all turns and the call that runs."""
        self._buffer: Ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0
        self._tip = -1
        """The turn that the buffer ends with; -1: none."""
        self._before: tuple[Ids, int, int] = (self._buffer, 0, -1)
        self._contexts: list[tuple[int, int]] = []
        """For each turn: the ids up to its end, and the turn it goes on from (-1: none)."""
        self._prompt: Ids = NO_IDS
        self._roles: Roles = ()
        self._extends = False
        self._sampled: list[Ids] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._versions: list[tuple[int, int]] = []
        self._cached = 0

    @property
    def context_tokens(self) -> int:
        """Ids so far on the current branch."""
        return self._length

    @property
    def context(self) -> Ids:
        """The ids so far on the current branch: a read-only view that later turns never change."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    @property
    def prompt_ids(self) -> Ids:
        """Ids that the prepared call adds: all of them in a branch of its own."""
        return self._prompt

    @property
    def goes_on_from(self) -> int:
        """The turn whose ids the prepared call goes on from; -1 in a branch of its own."""
        return self._tip if self._extends else -1

    @property
    def call_tokens(self) -> int:
        """Tokens the running call has sampled so far."""
        return sum(map(len, self._sampled))

    def extend(self, added: Ids, after: int | None = None, roles: Roles = ()) -> None:
        """Prepare a call whose prompt is everything up to the turn `after` (None: the latest), and then `added`."""
        before = (self._buffer, self._length, self._tip)
        if after is not None and after != self._tip:
            ids = self.ids_after(after)
            self._buffer = np.empty(max(_FIRST_CAPACITY, 2 * (len(ids) + len(added))), np.int32)
            self._length, self._tip = 0, after
            self._append(ids)
        self._before = before
        self._extends = self._tip >= 0
        self._prompt = added
        self._roles = roles
        self._append(added)

    def ids_after(self, turn: int) -> Ids:
        """All ids up to the end of a turn: its prompt, whole, and what it sampled."""
        parts: list[Ids] = []
        while turn >= 0:
            parts += (self.turns[turn].sampled_ids, self.turns[turn].prompt_ids)
            turn = self._contexts[turn][1]
        return np.concatenate(parts[::-1])

    def prompt(self, whole: Ids, roles: Roles = (), *, look: bool = True) -> bool:
        """Prepare a call with this prompt; returns whether it extends the ids of a turn, exactly.

        `look` False: it is known not to.
        """
        after = self._extended_by(whole) if look else -1
        if after >= 0:
            added = whole[self._contexts[after][0] :].copy()
            added.flags.writeable = False
            self.extend(added, after)
            return True
        self._before = (self._buffer, self._length, self._tip)
        self._extends = False
        self._tip = -1
        self._prompt = whole
        self._roles = roles
        self._buffer = np.empty(max(_FIRST_CAPACITY, 2 * len(whole)), np.int32)
        self._length = 0
        self._append(whole)
        return False

    def _extended_by(self, whole: Ids) -> int:
        """The turn with the most ids of those that `whole` begins with; -1 if there is none."""
        length = self._length
        if self._tip >= 0 and len(whole) >= length and np.array_equal(whole[:length], self._buffer[:length]):
            return self._tip
        best, most = -1, -1
        for number, (end, _) in enumerate(self._contexts):
            sampled = self.turns[number].sampled_ids
            ends_alike = most < end <= len(whole) and np.array_equal(whole[end - len(sampled) : end], sampled)
            if ends_alike and np.array_equal(whole[:end], self.ids_after(number)):
                best, most = number, end
        return best

    def segment(self, ids: Ids, logprobs: NDArray[np.float32], versions: VersionRuns, cached: int) -> None:
        """Take in what one engine request of the running call sampled."""
        if not self._sampled:
            self._cached = cached
        if not len(ids):
            return
        self._append(ids)
        self._sampled.append(ids)
        self._logprobs.append(logprobs)
        self._versions += versions
        self.sampled_tokens += len(ids)

    def commit(
        self,
        finish: Finish,
        *,
        engine: EngineId,
        queued_s: float,
        started: float,
        ended: float,
        segments: int,
    ) -> Turn:
        """The running call has ended: record it as a turn."""
        versions: VersionRuns
        if len(self._sampled) == 1:
            sampled, logprobs = self._sampled[0], self._logprobs[0]
            versions = tuple(self._versions)
        elif self._sampled:
            sampled, logprobs = np.concatenate(self._sampled), np.concatenate(self._logprobs)
            sampled.flags.writeable = logprobs.flags.writeable = False
            versions = _merged(self._versions)
        else:
            sampled, logprobs, versions = NO_IDS, _NO_LOGPROBS, ()
        turn = Turn(
            self._prompt,
            sampled,
            logprobs,
            versions,
            self._extends,
            finish,
            engine,
            self._cached,
            queued_s,
            started,
            ended,
            segments,
            self._tip if self._extends and self._tip != len(self.turns) - 1 else -1,
            self._roles,
        )
        self._contexts.append((self._length, self._tip if self._extends else -1))
        self._tip = len(self.turns)
        self.turns.append(turn)
        self._clear()
        return turn

    def roll_back(self) -> None:
        """The running call sampled nothing and is forgotten: as if it had not been prepared."""
        if self._sampled:
            raise EnvError("a model call that sampled tokens cannot be rolled back")
        buffer, self._length, self._tip = self._before
        # A copy, since the context handed out for the forgotten call still shows what comes after.
        self._buffer = np.empty(len(buffer), np.int32)
        self._buffer[: self._length] = buffer[: self._length]
        self._clear()

    def _clear(self) -> None:
        self._sampled = []
        self._logprobs = []
        self._versions = []
        self._cached = 0
        self._prompt = NO_IDS
        self._roles = ()

    def _append(self, ids: Ids) -> None:
        end = self._length + len(ids)
        if end > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), end), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown  # contexts handed out before keep the old one alive, unchanged
        self._buffer[self._length : end] = ids
        self._length = end


def _merged(runs: list[tuple[int, int]]) -> VersionRuns:
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)


_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)
_NO_LOGPROBS.flags.writeable = False
