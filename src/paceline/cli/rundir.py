"""Run directories: which one, what is in it, and where a resumed run goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from paceline.config import RunConfig
from paceline.domain.events import RunOpened
from paceline.errors import ConfigError, WireError
from paceline.journal import read_journal
from paceline.journal.files import file_numbers
from paceline.transport.layout import STATUS
from paceline.transport.status import RunStatus, read_status, write_status

CONFIG_FILE = "config.toml"
CONFIGS = "configs"
"""One file a life."""
LOCK_FILE = "run.lock"
_SOURCE = re.compile(r"  # (.+):\d+$", re.MULTILINE)
"""Of a value in a config that is kept: the file that it was read from."""
_TRAINER_CHECKPOINT = re.compile(r"v(\d{8})")
_LOCK_WAIT_S = 10.0
"""A killed run's processes end within seconds; after that, somebody runs it."""
_LOCK_POLL_S = 0.1


class RunLock:
    """Held by a run and by every process it starts: who has it is alone in the directory.

    A killed run's trainer may still be finishing a step when the run is resumed; what it would publish then must not
    be taken for the new one's. So the lock is an open file that the children inherit: it is free once all are gone.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], *, wait_s: float = _LOCK_WAIT_S) -> None:
        """Waits a moment for the processes of a run that was killed. ConfigError when somebody runs it."""
        try:
            self.fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{run_dir} cannot be written: {error}; mend that, or choose another with --run.dir"
            ) from error
        try:
            self._take(run_dir, say, wait_s)
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, run_dir: Path, say: Callable[[str], None], wait_s: float) -> None:
        deadline, told = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    status = None
                    with contextlib.suppress(WireError):
                        status = read_status(run_dir)
                    who = f" (process {status.pid} on {status.host})" if status and status.pid else ""
                    raise ConfigError(
                        f"{run_dir} is being run by another process{who}: end that one first, or start a run of its "
                        "own without --resume"
                    ) from None
                if not told:
                    say("waiting for the processes of the run's earlier life to end")
                    told = True
                time.sleep(_LOCK_POLL_S)
            except OSError:
                return  # a file system without locks: that a run is started once is then up to whoever starts it
            else:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def new_run_dir(config: RunConfig) -> tuple[Path, str]:
    """A fresh directory `dir/name`, or `dir/name-2` and so on, and an id for the run."""
    root = _root(config)
    path, number = root / config.run.name, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = root / f"{config.run.name}-{number}"
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot make {path}: {error}; choose another with --run.dir"
            ) from error
        else:
            return path, f"{path.name}-{secrets.token_hex(4)}"


def _root(config: RunConfig) -> Path:
    # Absolute: engines, which may run elsewhere, are told to load weights from there.
    return Path(config.run.dir).expanduser().absolute()


def existing_run_dir(config: RunConfig, given: str) -> Path:
    """The directory that `--resume` names, else the newest of runs of this name. ConfigError when there is none."""
    if given:
        run_dir = Path(given).expanduser().absolute()
        if not run_dir.is_dir():
            raise ConfigError(f"--resume: there is no run directory {run_dir}")
        # Before a lock file is put there.
        if not (run_dir / STATUS).exists() and not file_numbers(run_dir, "log"):
            raise ConfigError(
                f"--resume: {run_dir} is no run directory: it has no status.json and no journal"
            )
        return run_dir
    return latest_run_dir(config)


def latest_run_dir(config: RunConfig) -> Path:
    """The newest directory of runs of this name. ConfigError when there is none."""
    root = _root(config)
    named = re.compile(rf"{re.escape(config.run.name)}(?:-(\d+))?")
    found = [
        (int(match[1] or 1), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if path.is_dir() and (match := named.fullmatch(path.name))
    ]
    if not found:
        raise ConfigError(
            f"--resume: there is no run called {config.run.name!r} in {root}: start it without --resume"
        )
    return max(found)[1]


def config_file(run_dir: Path, number: int) -> Path:
    """The config of a life by its number (`RunOpened.config`); 0, of a journal that does not say: that of the last life."""
    return run_dir / CONFIGS / f"{number:06d}.toml" if number else run_dir / CONFIG_FILE


def keep_config(run_dir: Path, text: str) -> int:
    """Write the config of the life that begins: as `config.toml`, and beside those of the lives before; its number."""
    folder = run_dir / CONFIGS
    folder.mkdir(exist_ok=True)
    lives = [int(path.stem) for path in folder.glob("*.toml") if path.stem.isdigit()]
    if not lives and (before := run_dir / CONFIG_FILE).is_file():  # a run that an earlier release began
        (folder / "000001.toml").write_bytes(before.read_bytes())
        lives = [1]
    number = max(lives, default=0) + 1
    (folder / f"{number:06d}.toml").write_text(text, encoding="utf-8")
    (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    return number


def sources_behind(kept: Path, provenance: Mapping[str, str]) -> dict[str, str]:
    """The provenance of a config that was read from one that a run keeps: each value comes from where that one says."""
    told: dict[str, str] = {}
    try:
        lines = kept.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for key, source in provenance.items():
        file, _, number = source.rpartition(":")
        behind = ""
        if file == str(kept) and number.isdigit() and 0 < int(number) <= len(lines):
            behind = lines[int(number) - 1].rpartition("  # ")[2] if "  # " in lines[int(number) - 1] else ""
        told[key] = behind or source
    return told


def folders_of(kept: Path) -> list[Path]:
    """Folders of the files that a kept config was made of, as far as they are there; none where it cannot be read."""
    try:
        sources = _SOURCE.findall(kept.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return []
    return [folder for folder in dict.fromkeys(Path(source).parent for source in sources) if folder.is_dir()]


def mend_status(run_dir: Path) -> list[str]:
    """Make a damaged or missing status.json again, and say so; nothing when it is sound.

    All that a resumed run needs of it is the run's id, which the journal holds too. ConfigError when that says nothing.
    """
    try:
        if read_status(run_dir) is not None:
            return []
        damage = "is gone"
    except (WireError, OSError) as error:
        damage = f"is damaged ({error})"
    try:
        opened = (r.event for r in read_journal(run_dir) if isinstance(r.event, RunOpened))
        run_id = next(opened).run_id
        write_status(run_dir, RunStatus(run_id=run_id, status="failed", reason=f"{STATUS} {damage}"))
    except (StopIteration, WireError) as error:
        why = str(error) or "it has no record yet"
        raise ConfigError(
            f"{run_dir}: {STATUS} {damage}, and the journal does not say either which run this is: {why}; start a run of "
            "its own, without --resume"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: {STATUS} {damage}, and cannot be made again: {error}; remove it"
        ) from error
    return [f"{STATUS} was {damage.removeprefix('is ')}: made again from the journal"]


def trainer_steps(run_dir: Path) -> list[int]:
    """Steps that the reference trainer has a checkpoint of, ascending."""
    folder = run_dir / "checkpoints" / "trainer"
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _TRAINER_CHECKPOINT.fullmatch(p.name)))
