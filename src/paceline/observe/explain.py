"""What the journal tells of one rollout, group, task or step: sentences with times, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import GroupId, RolloutId
from paceline.observe.fold import Decision


class Subject:
    """What is asked about. Give one of these; a task is (environment, index)."""

    def __init__(
        self,
        *,
        rollout: RolloutId | None = None,
        group: GroupId | None = None,
        task: tuple[str, int] | None = None,
        step: int | None = None,
    ) -> None:
        self._rollout, self._task, self._step = rollout, task, step
        self._groups: set[GroupId] = {group} if group is not None else set()

    def has(self, rollout: RolloutId) -> bool:
        return rollout == self._rollout or rollout.group in self._groups

    def has_group(self, group: GroupId) -> bool:
        return group in self._groups or (self._rollout is not None and group == self._rollout.group)

    def has_step(self, step: int) -> bool:
        return step == self._step

    def is_task(self, env: str, index: int) -> bool:
        return self._task == (env, index)

    def learn(self, command: do.StartRollout) -> None:
        """A task has groups, which show when they start."""
        if self._task == (command.task.env, command.task.index):
            self._groups.add(command.rollout.group)


def explain(decisions: Iterable[Decision], subject: Subject) -> Iterator[tuple[float, str]]:
    """(second of the run, sentence) of all that concerns the subject."""
    for decision in decisions:
        for text in _of_event(decision.event, subject):
            yield decision.at, text
        for command in decision.commands:
            for text in _of_command(command, subject):
                yield decision.at, text


def _of_event(event: Event, subject: Subject) -> Iterator[str]:
    match event:
        case on.TurnRequested() if subject.has(event.rollout):
            yield f"{event.rollout} asked for a model call, {event.context_tokens} tokens of context, and waited"
        case on.SegmentEnded() if subject.has(event.rollout):
            tokens = sum(count for _, count in event.versions)
            under = ", ".join(dict.fromkeys(f"v{version}" for version, _ in event.versions)) or "no version"
            failed = f"; it failed: {event.error}" if event.error else ""
            yield (
                f"{event.rollout} had {tokens} tokens from {event.engine} under {under} after {event.seconds:.2f} s "
                f"({event.finish}){failed}"
            )
        case on.RolloutContinued() if subject.has(event.rollout):
            lost = f"; {event.lost} were lost: {event.why}" if event.lost else ""
            yield f"{event.rollout} continued after the restart from {event.tokens:,} tokens{lost}"
        case on.RolloutEnded(rollout=rollout) if subject.has(rollout.id):
            outcome = rollout.outcome
            why = ": ".join(filter(None, (outcome.cause, outcome.detail)))
            reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
            yield f"{rollout.id} {outcome.ending}{f' ({why})' if why else ''}, {reward}"
        case on.GroupProcessed(result=result):
            for verdict in result.verdicts:
                if subject.has(verdict.rollout):
                    why = f": {verdict.reason}" if verdict.reason else ""
                    said = "" if verdict.advantage is None else f", advantage {verdict.advantage:+.3g}"
                    yield f"{verdict.rollout} was judged {verdict.fate.replace('_', ' ')}{why}{said}"
        case on.BatchShipped() if subject.has_step(event.step):
            yield f"batch {event.step} was on disk: {event.bytes} bytes, sent in {event.send_s:.2f} s"
        case on.StepTrained() if subject.has_step(event.step):
            yield f"the trainer acknowledged step {event.step}"
        case on.PolicyPublished() if subject.has_step(event.version):
            yield f"the trainer published v{event.version}"


def _of_command(command: Command, subject: Subject) -> Iterator[str]:
    match command:
        case do.StartRollout():
            subject.learn(command)
            if subject.has(command.rollout):
                why = f": {command.reason}" if command.reason else ""
                task = f"{command.task.env} task {command.task.index}"
                yield f"{command.rollout} ({task}) was started on {command.engine}, v{command.version}{why}"
        case do.ContinueRollout() if subject.has(command.rollout):
            where = f"on {command.engine}, v{command.version}" if command.engine else "to be ended"
            yield (
                f"{command.rollout} was begun again {where}, over the {command.tokens:,} tokens that it had: "
                f"{command.reason}"
            )
        case do.GrantTurn() if subject.has(command.rollout):
            yield f"{command.rollout} was let through to {command.engine}, which held v{command.version}"
        case do.CancelRollout() if subject.has(command.rollout):
            yield f"{command.rollout} was cancelled as {command.cause}: {command.reason}"
        case do.ParkRollout() if subject.has(command.rollout):
            yield f"{command.rollout} was parked: {command.reason}"
        case do.NoteLate() if subject.has(command.rollout):
            yield f"{command.rollout} goes on in a later round: {command.reason}"
        case do.NoteReferences() if subject.has_group(command.group):
            rewards = ", ".join(f"{reward:.3g}" for reward in command.references)
            yield f"group {command.group} is compared with rewards of {rewards}: {command.reason}"
        case do.ResumeRollout() if subject.has(command.rollout):
            yield f"{command.rollout} might go on: {command.reason}"
        case do.NoteRetry() if subject.has(command.rollout):
            yield f"{command.rollout} is tried again: {command.reason}"
        case do.NoteQuarantine() if subject.is_task(command.env, command.index):
            yield command.reason
        case do.NoteOpened(task=task) if subject.has_group(command.group) or subject.is_task(
            task.env, task.index
        ):
            yield f"group {command.group} ({task.env} task {task.index}) was opened; its {command.size} members wait for room"
        case do.NoteRedraw(task=task) if subject.is_task(task.env, task.index):
            yield f"{task.env} task {task.index} was cut short by the end of the run, and is begun again when it goes on"
        case do.SkipTask(task=task) if subject.is_task(task.env, task.index):
            yield f"{task.env} task {task.index} came next in epoch {task.epoch}, and was passed over"
        case do.NoteStale() if subject.has(command.rollout):
            yield f"{command.rollout} grew stale and was {command.action}: {command.reason}"
        case do.NoteDiscarded() if subject.has(command.rollout):
            yield f"{command.rollout} was thrown away: {command.reason}"
        case do.ProcessGroup(group=group) if subject.has_group(group.id):
            yield f"group {group.id} closed with {len(group.rollouts)} of {group.size} members: {command.reason}"
        case do.ShipBatch(batch=batch):
            if subject.has_step(batch.step):
                yield (
                    f"batch {batch.step} was cut: {len(batch.rollouts)} rollouts, {batch.tokens} tokens; "
                    f"{command.reason}"
                )
            for rollout in batch.rollouts:
                if subject.has(rollout):
                    yield f"{rollout} went into batch {batch.step}, which trained v{batch.trains}"
