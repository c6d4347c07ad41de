"""Kept journals: a run's events and commands in one small file, and what is needed to decide them again. See `docs/kept.md`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from paceline import __version__
from paceline.cli.cores import EnvFacts, config_at, core_maker, facts_of, look_where_the_command_is_given
from paceline.cli.disk import size_of
from paceline.cli.rundir import config_file
from paceline.core.rebuild import Extras
from paceline.core.replay import NotCovered, Report, replay
from paceline.domain.events import GroupProcessed, RolloutEnded, RunOpened
from paceline.domain.ids import EnvName, RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError, WireError
from paceline.journal import Record, read_journal
from paceline.journal.kept import kept_start, read_about, read_kept, write_records
from paceline.journal.lines import line_of
from paceline.transport.layout import replace_file

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.core.scheduler import Core


class KeptConfig(msgspec.Struct, frozen=True):
    """What the cores of some lives were made from."""

    sections: dict[str, Any]
    environments: tuple[EnvFacts, ...]


class Kept(msgspec.Struct, frozen=True):
    """What a kept journal says of itself."""

    release: str
    """That kept it."""
    records: int
    decided: int
    """Records that could be decided again when it was kept."""
    configs: dict[int, KeptConfig]
    """By the number that `RunOpened` has."""


class KeptRun:
    """A kept journal, as `replay` reads it."""

    def __init__(self, path: Path) -> None:
        """WireError if it is none, or of another release's make."""
        self._path = path
        about = read_about(path)
        try:
            self.about = msgspec.json.decode(about, type=Kept)
        except msgspec.MsgspecError as error:
            raise WireError(f"{path} says of itself what this Paceline cannot read: {error}") from error
        self._makers: dict[int, Callable[[], Core]] = {}

    @property
    def sizes(self) -> dict[EnvName, int]:
        """Of groups, for journals that do not say."""
        kept = self.about.configs.values()
        return {env["name"] or env["id"]: env["group_size"] for each in kept for env in each.sections["env"]}

    def core(self, opened: RunOpened) -> Core:
        """The core of a life. NotCovered when its config was not there to be kept."""
        number = opened.config
        if number not in self.about.configs:
            raise NotCovered("its config was gone when it was kept")
        if number not in self._makers:
            kept = self.about.configs[number]
            self._makers[number] = core_maker(_config_of(kept.sections, self._path), kept.environments)
        return self._makers[number]()

    def records(self, since: int) -> Iterator[Record]:
        """WireError when some are missing."""
        last = -1
        for record in read_kept(self._path, since):
            yield record
            last = record.seq
        if not since and last + 1 < self.about.records:
            raise WireError(
                f"{self._path} ends with record {last} and says that it has {self.about.records}: it is cut off; take it "
                "from where it was kept again"
            )

    def stored(
        self, wanted: frozenset[RolloutId], since: int
    ) -> tuple[Mapping[RolloutId, Rollout], Mapping[RolloutId, Extras]]:
        """Rollouts with as many tokens as they had, all of them 0: nothing is decided by which they are."""
        rollouts: dict[RolloutId, Rollout] = {}
        extras: dict[RolloutId, dict[int, Any]] = {}
        for record in self.records(0) if wanted else ():
            event = record.event
            if isinstance(event, RolloutEnded) and event.rollout.id in wanted:
                rollouts[event.rollout.id] = event.rollout
            if isinstance(event, GroupProcessed):
                for verdict in event.result.verdicts:
                    for number, sample in enumerate(verdict.samples):
                        per_token = sample.advantage if isinstance(sample.advantage, np.ndarray) else None
                        if verdict.rollout in wanted and (sample.streams or per_token is not None):
                            extras.setdefault(verdict.rollout, {})[number] = (per_token, sample.streams)
        return rollouts, extras

    def checkpoint(self, seq: int) -> dict[str, Any] | None:
        """None was kept: the core that decides again makes them again."""
        return None


class Keeping(NamedTuple):
    """What came of it."""

    path: Path
    report: Report
    of: int
    """Records that the run has."""
    nbytes: int

    @property
    def is_kept(self) -> bool:
        return self.report.divergence is None and self.report.records > 0

    def told(self) -> str:
        """A sentence for people."""
        kept = self.report.records + sum(each.records for each in self.report.skipped)
        lives = "1 life" if self.report.lives == 1 else f"{self.report.lives} lives"
        most = "" if kept == self.of else f" (the first of {self.of}; --keep-mb takes more)"
        what = "all of them" if kept == self.report.records else f"{self.report.records} of them"
        return (
            f"kept {kept} records of {lives}{most} in {self.path} ({size_of(self.nbytes)}); this release decides {what} "
            "as they were"
        )


def keep(run_dir: Path, path: Path, most_bytes: int, *, on_note: Callable[[str], None]) -> Keeping:
    """Write the records of a run to one file, unless this release decides them otherwise: then nothing is written."""
    if not path.name or path.is_dir() or (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ConfigError(f"--keep {path}: a file is written, so name one, in a folder that is there")
    records = partial(read_journal, run_dir, on_note=on_note)
    opened: dict[int, str] = {}
    count = 0
    for record in records():
        count += 1
        if isinstance(record.event, RunOpened):
            opened[record.event.config] = record.event.run_id
    body = BytesIO()
    written = write_records(body, records(), most_bytes)
    if not count:
        raise ConfigError(f"{run_dir}: its journal has no whole record, so there is nothing to keep")
    if not written:
        raise ConfigError(f"{most_bytes} bytes hold no records: raise --keep-mb")
    configs = {
        number: _kept_config(file) for number in opened if (file := config_file(run_dir, number)).is_file()
    }
    about = Kept(__version__, written, 0, configs)
    run_id = next(iter(opened.values()), "")

    def whole(about: Kept) -> bytes:
        return kept_start(run_id, msgspec.json.encode(about)) + body.getvalue()

    with TemporaryDirectory() as folder:
        draft = Path(folder) / "kept"
        draft.write_bytes(whole(about))
        kept = KeptRun(draft)
        report = replay(kept, kept.core, line_of, kept.sizes)
    data = whole(msgspec.structs.replace(about, decided=report.records))
    keeping = Keeping(path, report, count, len(data))
    if keeping.is_kept:
        try:
            replace_file(path, data)
        except OSError as error:
            raise ConfigError(f"--keep {path}: {error}") from error
    return keeping


def _kept_config(path: Path) -> KeptConfig:
    config = config_at(path)
    return KeptConfig(_sections_of(config), tuple(map(_nameless, asyncio.run(facts_of(config)))))


def _nameless(facts: EnvFacts) -> EnvFacts:
    """A fingerprint may spell out the environment's arguments; all that is asked of it is whether it is another."""
    hashed = blake2b(facts.fingerprint.encode(), digest_size=16).hexdigest()
    return msgspec.structs.replace(facts, fingerprint=hashed)


def _sections_of(config: RunConfig) -> dict[str, Any]:
    """What decisions go by, and nothing that could be anybody's secret."""
    sections: dict[str, Any] = config.model_dump(
        mode="json",
        include={
            "run": {"seed", "deterministic", "max_steps", "outage_s"},
            "engine": {"type", "lost_s"},
            "trainer": {"type"},
            "algorithm": {"name"},
            **dict.fromkeys(
                ("sampling", "env", "mix", "eval", "scheduling", "admission", "batch", "checkpoint"), True
            ),
        },
        exclude={
            "env": {"__all__": {"args": True, "workers": True, "algorithm": {"args": True}}},
            "eval": {"__all__": {"args", "workers"}},
        },
    )
    return sections


def _config_of(sections: dict[str, Any], path: Path) -> RunConfig:
    from pydantic import ValidationError

    from paceline.config import RunConfig

    look_where_the_command_is_given()
    given = {**sections, "model": {"name": "none"}}
    if given["engine"]["type"] != "embedded":
        given["engine"] = {**given["engine"], "urls": ["http://none"]}
    try:
        return RunConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: its config is none that this release takes: {error}; keep the journal of a new run"
        ) from error
