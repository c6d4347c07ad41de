"""Which failed attempts are tried again: a member by itself, or all members of a group that runs in one call."""

from __future__ import annotations

from typing import Final

from paceline.core.accounting import Account
from paceline.core.flights import Flight
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.launching import Launcher
from paceline.core.outbox import Outbox
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef

_RETRIED: Final = frozenset({"infrastructure", "engine"})
"""Causes that say nothing of the task, nor of the policy."""

_CUT_OFF: Final = "restart: it is not counted as an attempt"


class Retries:
    """Puts members in line again whose attempts failed, and says so."""

    def __init__(
        self, setup: CoreSetup, groups: GroupLedger, launcher: Launcher, account: Account, out: Outbox
    ) -> None:
        self._whole = setup.whole_groups
        self._limits = {spec.name: spec.max_attempts for spec in setup.train}
        self._groups = groups
        self._launcher = launcher
        self._account = account
        self._out = out

    def failed(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> bool:
        """An attempt of a train rollout has ended. Whether its member is tried again."""
        outcome = rollout.outcome
        if outcome.ending != "failed" or outcome.cause not in _RETRIED or self._runs_whole(rollout.task):
            return False
        limit = self._limits[rollout.task.env]
        if group.attempts_of(rollout.id) >= limit:
            return False
        flight.account.move("in_flight", "failed", flight.sampled)
        group.tokens[rollout.id] = flight.sampled
        self._again(group, rollout, f"{outcome.cause}: at most {limit} attempts")
        return True

    def failed_whole(self, last: Rollout, group: OpenGroup) -> bool:
        """Members of a group that runs in one call end together; the last of them says whether all are tried again."""
        if not self._runs_whole(last.task) or not group.awaits_one:
            return False
        members = [last, *group.arrived]
        lost = [m for m in members if m.outcome.ending == "failed" and m.outcome.cause in _RETRIED]
        limit = self._limits[last.task.env]
        if not lost or group.attempts_of(last.id) >= limit:
            return False
        if any(m.outcome.ending == "cancelled" and m.outcome.cause != "self" for m in members):
            return False  # we wanted it to end
        why = f"{lost[0].outcome.cause} (member {lost[0].id.member}); the group runs in one call: at most {limit} attempts"
        self._all_again(group, members, why)
        return True

    def cut_off(self, flight: Flight, rollout: Rollout) -> None:
        """The end of an earlier life cut an attempt off: not its environment's fault, so its member always gets another.
        Evals are measured again as a whole."""
        if rollout.task.split == "eval":
            flight.account.move("in_flight", "eval", flight.sampled)
            return
        is_open = self._groups.has(rollout.id)
        if not is_open or not self._runs_whole(rollout.task):
            flight.account.move("in_flight", "failed", flight.sampled)
            if is_open:
                group = self._groups.of(rollout.id)
                group.excuse(rollout.id)
                group.tokens[rollout.id] = flight.sampled
                self._again(group, rollout, _CUT_OFF)
            return
        # Its members ran in one call: none can be tried again by itself, and the last one takes the others along.
        group = self._groups.of(rollout.id)
        flight.account.move("in_flight", "grouped", flight.sampled)
        group.tokens[rollout.id] = flight.sampled
        if not group.awaits_one:
            group.arrived.append(rollout)
            return
        members = [rollout, *group.arrived]
        for member in members:
            group.excuse(member.id)
        self._all_again(group, members, _CUT_OFF)

    def _runs_whole(self, task: TaskRef) -> bool:
        return (task.split, task.env) in self._whole

    def _again(self, group: OpenGroup, rollout: Rollout, why: str) -> None:
        self._launcher.try_again(group)
        group.retries.append(rollout)
        self._out.say(do.NoteRetry(rollout.id, why))

    def _all_again(self, group: OpenGroup, members: list[Rollout], why: str) -> None:
        """This attempt brings nothing."""
        account = self._account.of("train", group.task.env)
        for member in members:
            account.move("grouped", "failed", group.tokens[member.id])
        group.arrived.clear()
        self._launcher.try_again(group)
        for member in members:
            group.retries.append(member)
            self._out.say(do.NoteRetry(member.id, why))
