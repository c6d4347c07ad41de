"""Agent programs as they are: a process that only knows the OpenAI or the Anthropic API, trained through the gateway.

    class Fixes(ProgramEnv):
        def command(self, data, folder):
            return [sys.executable, "-m", "my_agent", data["issue"]]

        def score(self, data, run):
            return float((run.folder / "answer.txt").read_text() == data["answer"])

Each rollout has a folder of its own, and a process group that ends with it, however it ends; and with the process that
started it, should that be killed (`orphans`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.endpoint import Endpoint
from paceline.envs.orphans import marked
from paceline.envs.plain import called
from paceline.envs.protocol import (
    Context,
    Environment,
    InfrastructureError,
    ListTasks,
    Model,
    Reply,
    Result,
    ScoringError,
    TaskSource,
)
from paceline.errors import ConfigError, EnvError, said_by

_KEPT: Final = 20_000
"""Characters of output that are kept for scoring and for people, the last: a program may print without end."""

_TERM_S: Final = 2.0
"""Between asking a program to end and making it."""

_DRAIN_S: Final = 1.0
"""For the last of what it said, once it and its group have ended: another session's process may hold its output open."""


@runtime_checkable
class Serves(Protocol):
    """A model that programs can be pointed at."""

    def serve(self) -> AbstractAsyncContextManager[Endpoint]:
        """Let a program that only knows the OpenAI or the Anthropic API ask the policy, as long as the context lasts.
        What it samples is recorded in this rollout. EnvError where there is no gateway."""
        ...


class ProgramRun(msgspec.Struct, frozen=True):
    """How a program went."""

    exit_code: int | None
    """Negative for a signal; None if it was ended because a limit was reached."""
    output: str
    """The end of what it printed, both streams."""
    folder: Path
    """Its working directory; removed when it has been scored."""
    last: Reply | None
    """What the model said last; None if the program asked nothing."""


class ProgramEnv(Environment):
    """Runs a program for each rollout; the program's model calls are the rollout's turns."""

    command_line: Sequence[str] = ()
    exit_code_matters: ClassVar[bool] = True
    """Whether a program that fails fails the rollout; else `score` judges it."""

    def __init__(
        self,
        command: Sequence[str] = (),
        tasks: Sequence[Mapping[str, Any]] | str = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is the program and its arguments; `{name}` in them stands for a field of the task. `tasks` are
        those, or the path of a JSONL file; every tenth is held out for evals. `environ` is set for the program."""
        self.command_line = tuple(command)
        self.rows = _rows(tasks)
        self.environ = dict(environ or {})

    # ── what an environment says ──

    def tasks(self, split: Split) -> TaskSource:
        held_out = split == "eval"
        chosen = [row for n, row in enumerate(self.rows) if (n % 10 == 9) == held_out]
        if not chosen:
            raise ConfigError(
                f"{type(self).__name__} has no tasks for {split}: give it `tasks`, or define tasks()"
            )
        return ListTasks(chosen)

    def command(self, data: Any, folder: Path) -> Sequence[str]:
        """The program and its arguments for one task; `folder` is its working directory."""
        fields = data if isinstance(data, Mapping) else {}
        return [_filled(part, fields) for part in self.command_line]

    def prepare(self, data: Any, folder: Path) -> Any:
        """Put into `folder` what the program needs; may be async."""

    def score(self, data: Any, run: ProgramRun) -> Any:
        """The reward of a run, or a whole `Result`; may be async. An exception leaves the rollout unscored."""
        raise NotImplementedError(f"{type(self).__name__} must define score(data, run)")

    # ── how it runs ──

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        if not isinstance(model, Serves):
            raise EnvError("this model serves no programs")
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        ctx.state = program = _Program(folder)
        try:
            await called(self, self.prepare, task.data, folder)
            async with model.serve() as endpoint:
                command = await called(self, self.command, task.data, folder)
                await program.run(command, {**self.environ, **endpoint.environ})
            run = program.result(model.last)
            if self.exit_code_matters and run.exit_code != 0 and model.last is None:
                raise EnvError(
                    f"the program ended with {run.exit_code} before it asked anything: {run.output[-500:]}"
                )
            return await self._scored(task, run)
        finally:
            # Of one that was cut what is left may be scored yet. Where it is not, the folder goes with the program.
            if not program.cut:
                program.clear()

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Scores what the program has left."""
        program = ctx.state
        if not isinstance(program, _Program):
            return None
        try:
            return await self._scored(task, program.result(model.last))
        finally:
            program.clear()

    async def _scored(self, task: Task, run: ProgramRun) -> Result:
        try:
            scored = await called(self, self.score, task.data, run)
        except Exception as error:
            raise ScoringError(f"score() raised {said_by(error)}") from error
        return scored if isinstance(scored, Result) else Result(reward=scored)


class _Program:
    """One process, and what it leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clear = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        """Remove the folder; when nobody knows the program any more, it is removed by itself."""
        self.cut = False
        """Whether it was interrupted: its folder is then wanted for scoring."""
        self._exit_code: int | None = None
        self._output = bytearray()

    async def run(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Until it ends, or is cancelled; then none of its processes is left."""
        if not command:
            raise ConfigError("there is no program to run: give `command`, or define command(data, folder)")
        process, output = await self._start(command, environ)
        try:
            reading = asyncio.get_running_loop().create_task(self._read(output))
            self._exit_code = await process.wait()
        except asyncio.CancelledError:
            self.cut = True
            raise
        finally:
            await _end_group(process)
            await asyncio.wait([reading], timeout=_DRAIN_S)
            reading.cancel()

    async def _start(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[asyncio.subprocess.Process, FileIO]:
        """The process, and what it says. The pipe is our own: asyncio takes a process for running until its pipe has ended, which a
        server that the program leaves in the background holds."""
        ours, theirs = os.pipe()
        output = FileIO(ours)  # closed here, or with its transport
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.folder,
                env={**os.environ, **environ, **marked()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            output.close()
            if isinstance(error, FileNotFoundError | PermissionError):
                raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}") from error
            if isinstance(
                error, OSError
            ):  # no process to be had: not the model's fault, and worth another attempt
                raise InfrastructureError(f"cannot start {command[0]!r}: {error}") from error
            raise
        finally:
            os.close(theirs)
        return process, output

    async def _read(self, output: FileIO) -> None:
        """The end of what it says, until nobody can say more."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            while chunk := await reader.read(65_536):
                self._output += chunk
                del self._output[: -4 * _KEPT]
        finally:
            transport.close()

    def result(self, last: Reply | None) -> ProgramRun:
        text = self._output.decode(errors="replace")[-_KEPT:]
        return ProgramRun(self._exit_code, text, self.folder, last)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of the program's process group, children that outlive it included."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(_ended(process)), _TERM_S)


async def _ended(process: asyncio.subprocess.Process) -> None:
    await process.wait()


def _filled(part: str, fields: Mapping[str, Any]) -> str:
    """Names in braces by what the task has for them; braces in what it has are left as they are."""
    if not fields:
        return part
    named = {str(name): str(value) for name, value in fields.items()}
    either = "|".join(map(re.escape, named))
    return re.sub(rf"\{{({either})\}}", lambda match: named[match[1]], part)


def _rows(tasks: Sequence[Mapping[str, Any]] | str) -> list[Any]:
    if not isinstance(tasks, str):
        return list(tasks)
    path = Path(tasks)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the tasks {tasks!r}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
    return rows
