"""Records as they are written: events and commands without token arrays.

Token ids, logprobs, messages and `info` of a rollout are in the rollout store; here an array is its length. Read back,
such a field holds zeros of the right length (they share one block of memory), so whoever counts tokens gets the same
numbers from the log as from the live events, and `read_rollouts` has the content.

What carries no arrays is written as the record it is. What does has a line of its own below, and a test that notices
when a record gains a field that its line does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain import commands as c
from paceline.domain import events as e
from paceline.domain.batch import Batch
from paceline.domain.group import ClosedGroup, Fate, GroupResult, Verdict
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId
from paceline.domain.rollout import Ending, Finish, Outcome, Rollout, Turn, VersionRuns
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef


class TurnLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    prompt_tokens: int
    sampled_tokens: int
    versions: VersionRuns
    extends: bool
    finish: Finish
    engine: EngineId = ""
    cached_tokens: int = 0
    queued_s: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    segments: int = 1
    after: int = -1
    roles: tuple[tuple[str, int], ...] = ()


class RolloutLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    id: RolloutId
    task: TaskRef
    outcome: Outcome
    turns: tuple[TurnLine, ...] = ()
    reward: Any = None
    """A float or None. What an environment said is not judged a second time here: a line that was written must
    be readable, whatever slipped through. So are `rewards` and `metrics`."""
    rewards: Any = None
    metrics: Any = None
    temperature: float = 1.0
    started: float = 0.0
    ended: float = 0.0
    model_s: float = 0.0
    gate_s: float = 0.0
    turn_rewards: tuple[float, ...] | None = None
    role: str = ""
    trains: bool = True


class SampleLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    tokens: int
    versions: VersionRuns
    rollout: RolloutId
    env: EnvName
    task_index: int
    ending: Ending
    reward: float
    temperature: float
    advantage: float | None
    """None when there is one a token."""
    streams: tuple[str, ...] = ()
    cut_tokens: int = 0


class VerdictLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    rollout: RolloutId
    fate: Fate
    reason: str = ""
    samples: tuple[SampleLine, ...] = ()
    advantage: float | None = None
    flags: tuple[str, ...] = ()
    prefix_breaks: int = 0


class GroupResultLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    group: GroupId
    verdicts: tuple[VerdictLine, ...]
    reward_mean: float | None = None
    reward_variance: float | None = None
    dead: str | None = None
    references: tuple[float, ...] = ()


class RolloutEndedLine(msgspec.Struct, frozen=True, gc=False, tag="RolloutEnded"):
    rollout: RolloutLine


class GroupProcessedLine(msgspec.Struct, frozen=True, gc=False, tag="GroupProcessed"):
    result: GroupResultLine
    seconds: float = 0.0
    error: str | None = None


class ProcessGroupLine(msgspec.Struct, frozen=True, gc=False, tag="ProcessGroup"):
    group: GroupId
    task: TaskRef
    size: int
    rollouts: tuple[RolloutId, ...]
    """Their records are in the `RolloutEnded` before."""
    reason: str = ""
    needs: int = 0
    references: tuple[float, ...] = ()
    fallback: float | None = None


class ShipBatchLine(msgspec.Struct, frozen=True, gc=False, tag="ShipBatch"):
    step: int
    rollouts: tuple[RolloutId, ...]
    samples: tuple[SampleLine, ...]
    reason: str = ""


class SaveCheckpointLine(msgspec.Struct, frozen=True, gc=False, tag="SaveCheckpoint"):
    """Without the state, which the checkpoint itself holds."""

    step: int
    reason: str = ""


_LINES: dict[type, type] = {
    e.RolloutEnded: RolloutEndedLine,
    e.GroupProcessed: GroupProcessedLine,
    c.ProcessGroup: ProcessGroupLine,
    c.ShipBatch: ShipBatchLine,
    c.SaveCheckpoint: SaveCheckpointLine,
}


def _as_written(records: Any) -> Any:
    return Union[tuple(_LINES.get(record, record) for record in get_args(records))]  # noqa: UP007 - made from a list


if TYPE_CHECKING:
    EventLine: TypeAlias = Any
    CommandLine: TypeAlias = Any
else:
    EventLine = _as_written(e.Event)
    CommandLine = _as_written(c.Command)


class Line(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One record of the log: what happened, and what the core wanted done about it."""

    seq: int
    at: float
    event: EventLine
    commands: tuple[CommandLine, ...] = ()


# --- to lines -------------------------------------------------------------------------------------------------


def turn_line(turn: Turn) -> TurnLine:
    return TurnLine(
        len(turn.prompt_ids),
        len(turn.sampled_ids),
        turn.versions,
        turn.extends,
        turn.finish,
        turn.engine,
        turn.cached_tokens,
        turn.queued_s,
        turn.started,
        turn.ended,
        turn.segments,
        turn.after,
        turn.roles,
    )


def rollout_line(rollout: Rollout) -> RolloutLine:
    return RolloutLine(
        rollout.id,
        rollout.task,
        rollout.outcome,
        tuple([turn_line(turn) for turn in rollout.turns]),
        rollout.reward,
        rollout.rewards,
        rollout.metrics,
        rollout.temperature,
        rollout.started,
        rollout.ended,
        rollout.model_s,
        rollout.gate_s,
        rollout.turn_rewards,
        rollout.role,
        rollout.trains,
    )


def _sample_line(sample: Sample) -> SampleLine:
    advantage = sample.advantage
    return SampleLine(
        len(sample.token_ids),
        sample.versions,
        sample.rollout,
        sample.env,
        sample.task_index,
        sample.ending,
        sample.reward,
        sample.temperature,
        None if isinstance(advantage, np.ndarray) else float(advantage),
        tuple(sample.streams),
        sample.cut_tokens,
    )


def _verdict_line(verdict: Verdict) -> VerdictLine:
    return VerdictLine(
        verdict.rollout,
        verdict.fate,
        verdict.reason,
        tuple([_sample_line(sample) for sample in verdict.samples]),
        verdict.advantage,
        verdict.flags,
        verdict.prefix_breaks,
    )


def _group_processed(event: e.GroupProcessed) -> GroupProcessedLine:
    result = event.result
    verdicts = tuple([_verdict_line(verdict) for verdict in result.verdicts])
    line = GroupResultLine(
        result.group, verdicts, result.reward_mean, result.reward_variance, result.dead, result.references
    )
    return GroupProcessedLine(line, event.seconds, event.error)


def _process_group(command: c.ProcessGroup) -> ProcessGroupLine:
    group = command.group
    return ProcessGroupLine(
        group.id,
        group.task,
        group.size,
        tuple([r.id for r in group.rollouts]),
        command.reason,
        group.needs,
        group.references,
        group.fallback,
    )


def _ship_batch(command: c.ShipBatch) -> ShipBatchLine:
    batch = command.batch
    samples = tuple([_sample_line(sample) for sample in batch.samples])
    return ShipBatchLine(batch.step, batch.rollouts, samples, command.reason)


_TO_LINE: dict[type, Callable[[Any], Any]] = {
    e.RolloutEnded: lambda event: RolloutEndedLine(rollout_line(event.rollout)),
    e.GroupProcessed: _group_processed,
    c.ProcessGroup: _process_group,
    c.ShipBatch: _ship_batch,
    c.SaveCheckpoint: lambda command: SaveCheckpointLine(command.step, command.reason),
}


def line_of(record: e.Event | c.Command) -> Any:
    """An event or command as it is written; equal lines are equal decisions."""
    to_line = _TO_LINE.get(type(record))
    return record if to_line is None else to_line(record)


# --- and back -------------------------------------------------------------------------------------------------


class _Zeros:
    """Read-only zeros of any length, all from one block that the system never has to fill."""

    def __init__(self, dtype: Any) -> None:
        self._block = np.zeros(1 << 16, dtype)
        self._block.flags.writeable = False

    def __call__(self, length: int) -> NDArray[Any]:
        if length > len(self._block):
            self._block = np.zeros(1 << length.bit_length(), self._block.dtype)
            self._block.flags.writeable = False
        return self._block[:length]


_IDS, _FLOATS, _BOOLS = _Zeros(np.int32), _Zeros(np.float32), _Zeros(np.bool_)


def turn_of(
    line: TurnLine,
    prompt_ids: NDArray[np.int32] | None = None,
    sampled_ids: NDArray[np.int32] | None = None,
    logprobs: NDArray[np.float32] | None = None,
) -> Turn:
    return Turn(
        _IDS(line.prompt_tokens) if prompt_ids is None else prompt_ids,
        _IDS(line.sampled_tokens) if sampled_ids is None else sampled_ids,
        _FLOATS(line.sampled_tokens) if logprobs is None else logprobs,
        line.versions,
        line.extends,
        line.finish,
        line.engine,
        line.cached_tokens,
        line.queued_s,
        line.started,
        line.ended,
        line.segments,
        line.after,
        line.roles,
    )


def rollout_of(line: RolloutLine, turns: Sequence[Turn] | None = None, **more: Any) -> Rollout:
    """The rollout; `turns`, `messages` and `info` are what the store has, or else left out."""
    return Rollout(
        id=line.id,
        task=line.task,
        outcome=line.outcome,
        turns=tuple([turn_of(turn) for turn in line.turns] if turns is None else turns),
        reward=line.reward,
        rewards=line.rewards or {},
        metrics=line.metrics or {},
        temperature=line.temperature,
        started=line.started,
        ended=line.ended,
        model_s=line.model_s,
        gate_s=line.gate_s,
        turn_rewards=line.turn_rewards,
        role=line.role,
        trains=line.trains,
        **more,
    )


def _sample_of(line: SampleLine) -> Sample:
    return Sample(
        token_ids=_IDS(line.tokens),
        trainable=_BOOLS(line.tokens),
        logprobs=_FLOATS(line.tokens),
        versions=line.versions,
        rollout=line.rollout,
        env=line.env,
        task_index=line.task_index,
        ending=line.ending,
        reward=line.reward,
        temperature=line.temperature,
        advantage=_FLOATS(line.tokens) if line.advantage is None else line.advantage,
        streams={name: _FLOATS(line.tokens) for name in line.streams},
        cut_tokens=line.cut_tokens,
    )


def _samples_of(lines: Sequence[SampleLine]) -> tuple[Sample, ...]:
    return tuple([_sample_of(line) for line in lines])


class Restorer:
    """Lines → events and commands, in the order of the log.

    `ProcessGroup` names rollouts that ended before; they are held until then, or until their group is forgotten.
    """

    def __init__(self) -> None:
        self._ended: dict[GroupId, dict[RolloutId, Rollout]] = {}
        self._moved: dict[tuple[GroupId, int], GroupId] = {}

    def event(self, line: EventLine) -> e.Event:
        """Before the commands of its record, which may name the rollout that ended here."""
        match line:
            case RolloutEndedLine():
                rollout = rollout_of(line.rollout)
                group = rollout.id.group
                if self._moved:
                    group = self._moved.get((group, rollout.id.member), group)
                self._ended.setdefault(group, {})[rollout.id] = rollout
                return e.RolloutEnded(rollout)
            case GroupProcessedLine(result=r):
                verdicts = tuple(
                    Verdict(
                        v.rollout,
                        v.fate,
                        v.reason,
                        _samples_of(v.samples),
                        v.advantage,
                        v.flags,
                        v.prefix_breaks,
                    )
                    for v in r.verdicts
                )
                result = GroupResult(
                    r.group, verdicts, r.reward_mean, r.reward_variance, r.dead, r.references
                )
                return e.GroupProcessed(result, line.seconds, line.error)
            case e.RunOpened(recovered=False):
                self._ended.clear()
                self._moved.clear()
        event: e.Event = line
        return event

    def command(self, line: CommandLine) -> c.Command:
        match line:
            case ProcessGroupLine():
                ended = self._ended.pop(line.group, {})
                rollouts = tuple(ended[id_] for id_ in line.rollouts if id_ in ended)
                group = ClosedGroup(
                    line.group, line.task, line.size, rollouts, line.needs, line.references, line.fallback
                )
                return c.ProcessGroup(group, line.reason)
            case ShipBatchLine():
                return c.ShipBatch(Batch(line.step, _samples_of(line.samples), line.rollouts), line.reason)
            case SaveCheckpointLine():
                return c.SaveCheckpoint(line.step, {}, line.reason)
            case c.SplitGroup():
                self._moved.update({(id_.group, id_.member): line.rest for id_ in line.rollouts})
            case c.ForgetGroup():
                self._ended.pop(line.group, None)
                if self._moved:
                    self._moved = {who: rest for who, rest in self._moved.items() if rest != line.group}
        command: c.Command = line
        return command
