"""Where a resumed run goes on: the core from its journal, the trainer from its newest checkpoint. See `docs/recovery.md`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.cli.rundir import trainer_steps
from paceline.config import ReferenceTrainer, RunConfig
from paceline.core.parts import UnderWay, whole_parts
from paceline.core.rebuild import Extras
from paceline.core.recovery import EMPTY, Recovery
from paceline.domain.commands import ProcessGroup, ShipBatch
from paceline.domain.ids import EnvName, RolloutId
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout
from paceline.errors import CannotFold, ConfigError, WireError
from paceline.journal import read_extras, read_journal, read_rollouts
from paceline.journal.files import file_numbers
from paceline.journal.frames import LeftOut
from paceline.journal.partial import read_parts
from paceline.runtime.checkpoints import Checkpoints
from paceline.transport.filesystem import check_weights
from paceline.transport.layout import VERSION_FILE, WEIGHTS, batch_dir, steps_in, versions_in, weights_dir
from paceline.transport.status import read_status


class Resumption(msgspec.Struct, frozen=True):
    """Where a resumed run goes on."""

    state: dict[str, Any]
    step: int
    """Batches cut."""
    trained: int
    """Step of the trainer's checkpoint: at most `step`."""
    rollouts: dict[RolloutId, Rollout] | None = None
    """Those that the state names. None when it goes on from a checkpoint alone, without the journal behind it."""
    under_way: tuple[UnderWay, ...] = ()
    """Attempts that the earlier life left under way, in the order of their start."""
    parts: dict[RolloutId, tuple[Part, ...]] = {}
    """What is left of those whose group is open."""
    at: float = 0.0
    """When the earlier life ended, in seconds of the run's clock."""
    owed: tuple[ProcessGroup | ShipBatch, ...] = ()
    """What was commanded then and never answered."""
    checkpoint: int = 0
    """Number of the first record that its checkpoint does not hold."""
    forgives: tuple[EnvName, ...] = ()
    """Environments whose tasks are drawn again that were in quarantine."""


def resumption(run_dir: Path, config: RunConfig) -> tuple[str, Resumption | None, list[str]]:
    """The run's id, where it goes on (None: from the beginning), and notes for people.

    The core goes on behind the last record of the journal; the trainer from its newest checkpoint t, and trains the
    batches t+1 and on again from disk. A trainer of the user's own has checkpoints of its own; there, t is the newest
    version it has published. WireError when the journal is damaged, or batches in between are gone.
    """
    status = read_status(run_dir)
    if status is None:
        raise ConfigError(f"{run_dir} is no run directory: it has no status.json")
    core = Checkpoints(run_dir / "checkpoints" / "core", config.checkpoint.keep_last, status.run_id)
    step, state, notes = _newest(core)
    try:
        read = read_back(
            run_dir, EMPTY if state is None else state, {env.label: env.group_size for env in config.env}
        )
        goes_on = recovered(run_dir, config, read)
        notes += read.notes
    except CannotFold as why:
        notes.append(f"it goes on from its checkpoint alone: {why}")
        if state is None:
            _drop_trainer_after(run_dir, 0)
            return status.run_id, None, [*notes, "and it has none yet: it starts again at step 1"]
        goes_on = Resumption(state, step, _trained(run_dir, config, step), checkpoint=state.get("seq", 0))
        lost = max(steps_in(run_dir / "batches"), default=0) - step
        if lost > 0:
            notes.append(f"{lost} later batches, cut after the last checkpoint, are cut again")
    _check_batches(run_dir, goes_on)
    if goes_on.trained and not weights_dir(run_dir, goes_on.trained).is_dir():
        raise WireError(
            f"{run_dir}: weights/v{goes_on.trained:06d} are gone, but the trainer's checkpoint is of that step"
        )
    if goes_on.trained:
        check_weights(run_dir, goes_on.trained, status.run_id)
    core.drop_after(step)
    _drop_trainer_after(run_dir, goes_on.trained)
    return status.run_id, goes_on, notes


class ReadBack(NamedTuple):
    """A journal, folded up to its last record."""

    recovery: Recovery
    rollouts: dict[RolloutId, Rollout]
    """Those that it wants."""
    extras: Mapping[RolloutId, Extras]
    at: float
    """Time of the last record, in seconds of the run's clock."""
    notes: tuple[str, ...] = ()
    """What was left out of it that is more than the unfinished end which every kill may leave."""


def recovered(run_dir: Path, config: RunConfig, read: ReadBack) -> Resumption:
    """Where the journal says that a run goes on. CannotFold when it does not say enough."""
    recovery = read.recovery
    return Resumption(
        recovery.state(read.rollouts, read.extras),
        recovery.cut,
        _trained(run_dir, config, recovery.cut),
        read.rollouts,
        tuple(recovery.under_way),
        _parts(run_dir, recovery),
        read.at,
        tuple(recovery.owed(read.rollouts, read.extras)),
        recovery.base,
    )


def read_back(run_dir: Path, state: dict[str, Any], group_sizes: Mapping[EnvName, int]) -> ReadBack:
    """Fold the journal's records behind a checkpoint into it, and fetch the tokens of what is owed.

    CannotFold when the journal does not say enough. WireError when it is damaged.
    """
    if "seq" not in state:
        raise CannotFold("the checkpoint is of a release that did not note its place in the journal")
    if not file_numbers(run_dir, "log"):
        raise CannotFold("there is no journal")
    recovery, at = Recovery(state, group_sizes), 0.0
    notes: list[str] = []

    def note(text: str) -> None:
        if isinstance(text, LeftOut):
            notes.append(text)

    try:
        for record in read_journal(run_dir, since=state["seq"], on_note=note):
            recovery.apply(record.seq, record.at, record.event, record.commands)
            at = record.at
        rollouts = _rollouts(run_dir, recovery, note)
        extras = read_extras(run_dir, since=recovery.since, on_note=note)
    except WireError as error:
        raise WireError(
            f"{error}; or move {run_dir / 'journal'} and {run_dir / 'rollouts'} aside, to go on from the newest "
            "checkpoint alone"
        ) from error
    return ReadBack(recovery, rollouts, extras, at, tuple(dict.fromkeys(notes)))


def _parts(run_dir: Path, recovery: Recovery) -> dict[RolloutId, tuple[Part, ...]]:
    """Of each train rollout under way that its group waits for."""
    left = [u for u in recovery.under_way if u.task.split == "train" and recovery.is_owed(u.id)]
    written = read_parts(run_dir, [each.id for each in left]) if left else {}
    return {each.id: whole_parts(written.get(each.id, ()), each.requests, each.sampled) for each in left}


def _rollouts(run_dir: Path, recovery: Recovery, note: Callable[[str], None]) -> dict[RolloutId, Rollout]:
    wanted = recovery.wanted()
    if not wanted:
        return {}
    found = {r.id: r for r in read_rollouts(run_dir, wanted, since=recovery.since, on_note=note)}
    if missing := sorted(map(str, wanted - set(found))):
        raise CannotFold(f"{len(missing)} rollouts are not in the rollout store, {missing[0]} is the first")
    return found


def _newest(core: Checkpoints) -> tuple[int, dict[str, Any] | None, list[str]]:
    try:
        found = core.newest_usable()
    except WireError as error:
        return 0, None, [str(error)]
    return (0, None, []) if found is None else found


def _check_batches(run_dir: Path, goes_on: Resumption) -> None:
    owed = {command.batch.step for command in goes_on.owed if isinstance(command, ShipBatch)}
    between = [n for n in range(goes_on.trained + 1, goes_on.step + 1) if n not in owed]
    missing = [n for n in between if not batch_dir(run_dir, n).is_dir()]
    if missing:
        raise WireError(
            f"{run_dir}: the trainer can go on from step {goes_on.trained}, the orchestrator from step {goes_on.step}, "
            f"but batch {missing[0]} in between is no longer kept: put back a checkpoint of the trainer of step "
            f"{missing[-1]} or later, or start a run of its own from the newest weights"
        )


def _trained(run_dir: Path, config: RunConfig, step: int) -> int:
    if isinstance(config.trainer, ReferenceTrainer):
        return max([t for t in trainer_steps(run_dir) if t <= step], default=0)
    whole = [v for v in versions_in(run_dir / WEIGHTS) if (weights_dir(run_dir, v) / VERSION_FILE).is_file()]
    return max([v for v in whole if v <= step], default=0)


def _drop_trainer_after(run_dir: Path, step: int) -> None:
    """Else they, being the newest, would be kept instead of the ones that the resumed run makes."""
    for later in trainer_steps(run_dir):
        if later > step:
            shutil.rmtree(run_dir / "checkpoints" / "trainer" / f"v{later:08d}")
    for unfinished in (run_dir / "checkpoints" / "trainer").glob(".v*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
