"""What must hold over all lives of a run that has finished, by its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from paceline.core.curriculum import Sampler
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import GroupId, RolloutId
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError
from paceline.testing.world import World


class Record(NamedTuple):
    at: float
    event: Event
    commands: tuple[Command, ...]


Origin: TypeAlias = TaskRef | int
"""What a group was opened for: a task that was drawn, or the number of what was put off."""


def check_records(records: Sequence[Record], world: World) -> None:
    """What must hold over all lives of a run that has finished. InvariantError names what does not."""

    started: dict[RolloutId, do.StartRollout] = {}
    ended: Counter[RolloutId] = Counter()
    closed: Counter[int] = Counter()
    processed: Counter[int] = Counter()
    shipped: Counter[RolloutId] = Counter()
    queued: set[RolloutId] = set()
    gone: Counter[RolloutId] = Counter()
    launched: Counter[tuple[str, str]] = Counter()
    sampled: Counter[tuple[str, str]] = Counter()
    steps: list[int] = []
    opened: dict[Origin, dict[GroupId, None]] = {}
    """Groups by what they were opened for."""
    skipped: set[TaskRef] = set()
    cut_short: Counter[Origin] = Counter()
    """Those that the end of a life stopped."""
    comes_back: dict[Origin, TaskRef] = {}
    """What was put off, or begins again, and has not been opened since: its task."""
    has: Counter[RolloutId] = Counter()
    to_go_on: set[RolloutId] = set()
    late: set[RolloutId] = set()
    origin: Origin
    for record in records:
        event = record.event
        if isinstance(event, on.RunOpened):
            to_go_on.update(event.continues)
        elif isinstance(event, on.RolloutContinued):
            rollout = event.rollout
            _rule(event.tokens + event.lost == has[rollout], "kept and lost", rollout, event, has[rollout])
            has[rollout] = event.tokens
            to_go_on.discard(rollout)
        elif isinstance(event, on.RolloutEnded):
            rollout = event.rollout.id
            ended[rollout] += 1
            if event.rollout.outcome.cause != "restart" and rollout not in to_go_on:
                recorded = event.rollout.sampled_tokens
                _rule(recorded == has[rollout], "tokens of a record", rollout, recorded, has[rollout])
        elif isinstance(event, on.SegmentEnded):
            task = started[event.rollout].task
            tokens = sum(count for _, count in event.versions)
            sampled[task.split, task.env] += tokens
            has[event.rollout] += tokens
        elif isinstance(event, on.GroupProcessed):
            processed[event.result.group] += 1
            queued.update(v.rollout for v in event.result.verdicts if v.fate == "queued")
        for command in record.commands:
            if isinstance(command, do.NoteOpened | do.StartRollout):
                comes_back.pop(command.put_off or command.task, None)
            elif isinstance(command, do.PutOff | do.NoteRedraw):
                _rule(command.task not in comes_back.values(), "comes back twice", command)
                origin = command.number if isinstance(command, do.PutOff) else command.put_off or command.task
                comes_back[origin] = command.task
            if isinstance(command, do.NoteOpened):
                origin = command.put_off or command.task
                opened.setdefault(origin, {})[command.group] = None
            elif isinstance(command, do.NoteRedraw):
                cut_short[command.put_off or command.task] += 1
            elif isinstance(command, do.SkipTask):
                skipped.add(command.task)
            elif isinstance(command, do.StartRollout):
                _rule(command.rollout not in started, "started twice", command.rollout)
                if command.task.split == "train":
                    origin = command.put_off or command.task
                    opened.setdefault(origin, {})[command.rollout.group] = None
                started[command.rollout] = command
                launched[command.task.split, command.task.env] += 1
            elif isinstance(command, do.NoteLate):
                late.add(command.rollout)
            elif isinstance(command, do.ProcessGroup):
                group = command.group
                closed[group.id] += 1
                came = [r for r in group.rollouts if r.id in late and r.outcome.ending != "cancelled"]
                scored = [r.id for r in came if r.reward is not None]
                _rule(
                    bool(group.references) or not scored, "late, and compared with nobody", group.id, *scored
                )
            elif isinstance(command, do.ShipBatch):
                steps.append(command.batch.step)
                shipped.update(command.batch.rollouts)
            elif isinstance(command, do.NoteDiscarded) or (
                isinstance(command, do.NoteStale) and command.action == "dropped"
            ):
                gone[command.rollout] += 1
    _check_draws(world, opened, skipped, cut_short)
    _rule(set(ended) == set(started), "started and ended differ", *sorted(set(ended) ^ set(started))[:4])
    for what, counts in (
        ("a rollout ended", ended),
        ("a group closed", closed),
        ("a group was processed", processed),
    ):
        twice = [key for key, count in counts.items() if count != 1]
        _rule(not twice, f"{what} more than once", *twice[:4])
    _rule(set(closed) == set(processed), "closed and processed differ", *(set(closed) ^ set(processed)))
    _rule(
        max(shipped.values(), default=1) == 1, "trained twice", *[r for r, n in shipped.items() if n > 1][:4]
    )
    _rule(steps == list(range(1, len(steps) + 1)), "steps are not 1, 2, 3, …", *steps[-4:])
    _rule(not set(shipped) & set(gone), "shipped and dropped", *list(set(shipped) & set(gone))[:4])
    lost = queued - set(shipped) - set(gone)
    left = sum(
        a.rollouts.get("left_over", 0) + a.rollouts.get("queued", 0)
        for a in world.core.account.streams().values()
    )
    _rule(len(lost) == left, "what was to train was lost", len(lost), left)
    for stream, account in world.core.account.streams().items():
        _rule(account.launched == launched[stream], "launched", stream, account.launched, launched[stream])
        _rule(account.sampled == sampled[stream], "sampled", stream, account.sampled, sampled[stream])


def _check_draws(
    world: World,
    opened: Mapping[Origin, Collection[GroupId]],
    skipped: Set[TaskRef],
    cut_short: Counter[Origin],
) -> None:
    """No task is left out, and none comes a second time but where a life ended before its group could bring anything."""

    for env, sampler in world.core.curriculum.samplers.items():
        from_start = Sampler(sampler.source, world.setup.seed)
        expected = {from_start.draw_fresh() for _ in range(sampler.drawn)}
        mine = {task for task in opened if isinstance(task, TaskRef) and task.env == env}
        _rule(expected <= mine | skipped, "tasks were left out", *(expected - mine - skipped))
        _rule(mine <= expected, "tasks came before their turn", *(mine - expected))
    for origin, groups in opened.items():
        _rule(len(groups) - 1 <= cut_short[origin], "opened again, and nobody knows why", origin, *groups)


def _rule(holds: bool, text: str, *facts: Any) -> None:
    if not holds:
        raise InvariantError(f"over all lives: {text}: {', '.join(map(str, facts))}")
