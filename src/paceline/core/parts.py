"""What is left of a rollout that the end of the orchestrator cut off, and whether it may go on from there.

See `docs/continuing.md`. Parts and journal are written apart, so one may know of a request that the other has lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec

from paceline.domain.ids import RolloutId, Version, parse_rollout_id
from paceline.domain.part import Part, sampled_crc
from paceline.domain.rollout import Outcome, Rollout
from paceline.domain.task import TaskRef


class Standing:
    """How long a rollout has waited to go on, in lives of the run that found it under way: time that it could not use."""

    __slots__ = ("seconds", "since")

    def __init__(self, seconds: float = 0.0, since: float | None = None) -> None:
        self.seconds = seconds
        """Of the waits that are over."""
        self.since = since
        """When the one that lasts began."""

    def begin(self, now: float) -> None:
        """A life that begins `now` has found it under way; if it still waited in the one before, that wait is over."""
        self.end(now)
        self.since = now

    def end(self, now: float) -> None:
        """It goes on."""
        if self.since is not None:
            self.seconds += now - self.since
            self.since = None


class UnderWay:
    """An attempt that has not ended, as the log tells of it."""

    __slots__ = ("id", "late", "oldest", "requests", "sampled", "started", "stood", "task")

    def __init__(
        self,
        rollout: RolloutId,
        task: TaskRef,
        sampled: int = 0,
        requests: int = 0,
        oldest: Version | None = None,
        started: float = 0.0,
        stood: Standing | None = None,
        late: bool = False,
    ) -> None:
        self.id = rollout
        self.task = task
        self.sampled = sampled
        """Tokens it has."""
        self.requests = requests
        """Engine requests that sampled something, those included whose tokens are gone."""
        self.oldest = oldest
        """Oldest version behind its tokens; None without any, and for evals, which do not grow stale."""
        self.started = started
        """In seconds of the run's clock."""
        self.stood = stood or Standing()
        self.late = late
        """Whether it was beyond a cut-off (`NoteLate`)."""

    def plain(self) -> list[Any]:
        """For a checkpoint; `restore` reads it."""
        task = [*msgspec.structs.astuple(self.task)]
        row = [str(self.id), task, self.sampled, self.requests, self.oldest, self.started]
        return [*row, self.stood.seconds, self.stood.since, self.late]

    @classmethod
    def restore(cls, row: Sequence[Any]) -> Self:
        """The inverse of `plain`. Earlier releases told no more than the tokens, or nothing of waits, or of what is late."""
        known = [*row[2:6], Standing(*row[6:8]), *row[8:]] if len(row) > 6 else row[2:]
        return cls(parse_rollout_id(row[0]), TaskRef(*row[1]), *known)


def whole_parts(parts: Iterable[Part], requests: int, sampled: int) -> tuple[Part, ...]:
    """Of what was written of one rollout, the parts that follow each other from its beginning.

    `requests` and `sampled`, engine requests and their tokens, are what the journal knows of: more is in no account, and
    does not count. A part that stands where another stood before takes its place, with all that came behind: an earlier
    life left its record there. One that goes on from other tokens than those kept does not follow.
    """
    kept: list[Part] = []
    crcs = [0]
    for part in sorted(parts, key=lambda part: part.number):
        if part.number >= requests:
            break
        at = (part.turn, part.before)
        while kept and (kept[-1].turn, kept[-1].before) >= at:
            kept.pop()
            crcs.pop()
        if part.behind in (None, crcs[-1]) and _follows(kept, part):
            kept.append(part)
            crcs.append(sampled_crc(part.sampled_ids, crcs[-1]))
    # What a life sampled that the journal has lost may stand where the next one sampled less, of which only the journal knows.
    while sum([part.tokens for part in kept]) > sampled:
        kept.pop()
    return tuple(kept)


def _follows(kept: Sequence[Part], part: Part) -> bool:
    """Whether nothing is missing between them."""
    if not kept:
        return part.turn == 0 and part.before == 0
    last = kept[-1]
    if part.turn == last.turn:
        return last.finish == "abort" and part.before == last.end
    return last.finish != "abort" and part.turn == last.turn + 1 and part.before == 0


def may_go_on(parts: Sequence[Part], *, is_replayable: bool) -> bool:
    """Whether an environment may be run again over these parts: it says so, or has heard no answer yet, and then runs
    as it would for a retry."""
    return is_replayable or not parts or (parts[-1].turn == 0 and parts[-1].finish == "abort")


def lost_rollout(rollout: RolloutId, task: TaskRef, at: float) -> Rollout:
    """The terminal record of an attempt that the end of the orchestrator cut off."""
    why = "the orchestrator ended while it ran"
    return Rollout(id=rollout, task=task, outcome=Outcome("failed", "restart", why), started=at, ended=at)
