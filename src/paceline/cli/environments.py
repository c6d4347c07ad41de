"""The environments of a run: inline ones, and those that stand for workers, which are started here."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import site
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import paceline
from paceline.cli.services import imported
from paceline.config import EnvSection, EvalSection, InlineWorkers, ProcessWorkers, RunConfig
from paceline.core.gates import Gate
from paceline.core.samplers import TaskSampler
from paceline.domain.ids import EnvName
from paceline.domain.task import Split
from paceline.envs.plain import close_after_chores
from paceline.envs.protocol import Environment
from paceline.envs.registry import make_environment, tasks_of
from paceline.envs.surroundings import Ask, ColdStarts, InRun, no_service
from paceline.envs.workers import start, wire
from paceline.envs.workers.environment import RemoteEnvironment
from paceline.envs.workers.pool import Launch, WorkerPool
from paceline.envs.workers.process import Outbound, connect, read_body
from paceline.errors import ConfigError, EnvError, PacelineError
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.processes import ChildProcess
from paceline.tokens.bridge import Bridge

_CHORES_S = 3.0
"""Seconds that what rollouts have left to do may hold up the end of a run."""

_PACKAGE = str(Path(paceline.__file__).parent)


class Environments:
    """The environments of a run, made once for each section, with the tasks of their split."""

    def __init__(self) -> None:
        self.runtimes: dict[tuple[Split, EnvName], EnvRuntime] = {}
        self.sizes: dict[tuple[str, EnvName], int | None] = {}
        self.fingerprints: dict[EnvName, str] = {}
        self.scores_groups: dict[EnvName, bool] = {}

    async def start(
        self, config: RunConfig, bridge: Bridge | None, *, logs: Path, ask: Ask, inherit: Sequence[int] = ()
    ) -> None:
        """Make them all, their workers side by side. ConfigError for the first that cannot be had."""
        sections: list[tuple[Split, EnvSection | EvalSection]] = [("train", s) for s in config.env]
        sections += [("eval", s) for s in config.eval]
        made = await asyncio.gather(
            *(environment_of(s, split, logs=logs, ask=ask, inherit=inherit) for split, s in sections),
            return_exceptions=True,
        )
        failure = None
        for (split, section), environment in zip(sections, made, strict=True):
            if isinstance(environment, BaseException):
                failure = failure or environment
                continue
            try:
                self._add(split, section, config, bridge, environment)
            except PacelineError as error:
                failure = failure or error
                await environment.close()
        if failure is not None:
            await self.close()
            raise failure

    def _add(
        self,
        split: Split,
        section: EnvSection | EvalSection,
        config: RunConfig,
        bridge: Bridge | None,
        environment: Environment,
    ) -> None:
        check_group(section, environment)
        source = tasks_of(environment, split, section.label)
        self.runtimes[split, section.label] = EnvRuntime(
            environment=environment,
            source=source,
            limits=section.limits,
            sampling=section.sampling.over(config.sampling),
            bridge=bridge,
        )
        self.sizes[split, section.label] = source.size
        if split == "train":
            self.fingerprints[section.label] = source.fingerprint
            self.scores_groups[section.label] = environment.all_or_nothing

    @property
    def whole_groups(self) -> dict[tuple[Split, EnvName], int]:
        """Environments that run their groups whole, and how many rollouts that are."""
        return {
            where: runtime.environment.surroundings.group_size
            for where, runtime in self.runtimes.items()
            if runtime.environment.whole_group
        }

    async def close(self) -> None:
        """All of them, though one may refuse."""
        async with contextlib.AsyncExitStack() as stack:
            for runtime in self.runtimes.values():
                stack.push_async_callback(close_after_chores, runtime.environment, _CHORES_S)


def check_group(section: EnvSection | EvalSection, environment: Environment) -> None:
    """ConfigError when a group cannot be dealt to the roles of its environment."""
    roles = tuple(getattr(environment, "roles", ()))
    name, size = ("group_size", section.group_size) if isinstance(section, EnvSection) else ("k", section.k)
    if roles and size % len(roles):
        raise ConfigError(
            f"env {section.label!r}: {name} = {size} rollouts cannot be dealt to its {len(roles)} roles "
            f"({', '.join(roles)}): set {name} to a multiple of {len(roles)}"
        )


def own_samplers(config: RunConfig) -> dict[EnvName, type[TaskSampler]]:
    """The samplers that the config names by import path."""
    return {
        section.label: imported(section.sampler, f"env {section.label!r}: sampler")
        for section in config.env
        if ":" in section.sampler
    }


def own_gates(config: RunConfig) -> dict[str, type[Gate]]:
    """The gates that the config names by import path."""
    return {
        gate.id: imported(gate.id, f"env {section.label!r}: gate")
        for section in config.env
        for gate in section.gates
        if ":" in gate.id
    }


class ProcessLink:
    """A worker process and its socket."""

    def __init__(
        self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child = child
        self._reader = reader
        self._writer = writer
        self._out = Outbound(writer)

    def send(self, record: wire.ToWorker) -> None:
        self._out.send(record)

    async def receive(self) -> list[wire.FromWorker] | None:
        body = await read_body(self._reader)
        return None if body is None else wire.from_worker(body)

    async def close(self, within_s: float) -> str:
        self._out.flush()
        await self.child.close(0.2, finish_s=within_s)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return self.child.obituary()


class ProcessLauncher:
    """Starts worker processes of one environment."""

    def __init__(self, settings: ProcessWorkers, logs: Path, inherit: Sequence[int] = ()) -> None:
        """`inherit`: file descriptors that they, and all they start, hold open."""
        self._settings = settings
        self._logs = logs
        self._inherit = tuple(inherit)

    async def __call__(self, name: str) -> ProcessLink:
        ours, theirs = socket.socketpair()
        try:
            python = interpreter(self._settings)
            child = await ChildProcess.start(
                [python, start.__file__, _PACKAGE, str(theirs.fileno()), str(self._settings.memory_mb or 0)],
                name=name,
                log_path=self._logs / f"{name.replace('/', '_').replace(':', '_')}.log",
                ready=None,
                error=EnvError,
                may_finish=True,
                inherit=(*self._inherit, theirs.fileno()),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await connect(ours)
        return ProcessLink(child, reader, writer)


def interpreter(settings: ProcessWorkers) -> str:
    """The Python of the workers. ConfigError when it is not there."""
    if settings.python is None:
        return sys.executable
    found = shutil.which(str(Path(settings.python).expanduser()))
    if found is None:
        raise ConfigError(
            f"workers.python = {settings.python!r} is no program: name the python of a virtual environment, "
            "such as .venv-agents/bin/python"
        )
    return found


def own_path() -> tuple[str, ...]:
    """Where modules of the user's own are looked for: all but the libraries of this interpreter."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries += [*site.getsitepackages(), site.getusersitepackages(), str(Path(_PACKAGE).parent)]
    roots = [Path(entry).resolve() for entry in libraries]
    own = []
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        if folder.is_dir() and not any(folder.is_relative_to(root) for root in roots):
            own.append(str(folder))
    return tuple(dict.fromkeys(own))


def cold_starts_of(section: EnvSection | EvalSection) -> ColdStarts:
    return ColdStarts(section.cold_starts, section.cold_starts_per_s)


async def environment_of(
    section: EnvSection | EvalSection,
    split: Split,
    *,
    logs: Path,
    inherit: Sequence[int] = (),
    ask: Ask = no_service,
) -> Environment:
    """The environment of a section, wherever it runs; its workers are up. ConfigError when it cannot be had."""
    size = section.group_size if isinstance(section, EnvSection) else section.k
    surroundings = InRun(size, cold_starts_of(section), ask)
    workers = section.workers
    if isinstance(workers, InlineWorkers):
        environment = make_environment(section.id, section.args)
        environment.bind(surroundings)
        return environment
    opening = wire.Open(section.id, section.args, section.label, split, size, own_path())
    launch: Launch
    if isinstance(workers, ProcessWorkers):
        launch = ProcessLauncher(workers, logs, inherit)
    else:
        from paceline.envs.workers.ray_link import RayLauncher

        launch = RayLauncher(workers)
    pool = WorkerPool(section.label, opening, launch, workers, surroundings)
    await pool.start()
    remote = RemoteEnvironment(pool)
    remote.bind(surroundings)
    return remote
