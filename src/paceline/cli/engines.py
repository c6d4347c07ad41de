"""The engines of a run: started or found, connected, and got back when they are gone.

Servers may also be added and taken out while the run goes on (`follow_list`).

embedded   a process each, ours: when it dies it is started again, on the model's own weights; the core then has it
           load the current ones before it is used
vllm, sglang
           somebody else's servers: when one stops answering, it is asked again and again
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from paceline.cli.engine_list import FILE, follow, write_list
from paceline.cli.paused import FileMarks
from paceline.config import EmbeddedEngine, RunConfig, SglangEngine, VllmEngine
from paceline.domain.events import EngineJoined, EngineLost, Event
from paceline.domain.ids import EngineId, Version
from paceline.engines import sglang
from paceline.engines.embedded.options import TOKEN_VARIABLE, EngineOptions
from paceline.engines.http import HttpEngine, Limits, RouterEngine, connect, connect_router
from paceline.errors import EngineError
from paceline.ports import Engine
from paceline.runtime.processes import ChildProcess
from paceline.runtime.slots import EngineSlot
from paceline.runtime.weight_check import ProbeCheck
from paceline.tokens.tokenizer import resolve_model_dir
from paceline.transport.probes import read_probes

log = logging.getLogger(__name__)

Poll: TypeAlias = Coroutine[Any, Any, None]

_DRAIN_POLL_S = 0.2
MOST_RESTARTS = 5
"""Times one engine is started again: if it dies more often, something kills it that a new start does not mend."""


class RunEngines:
    """All engines of one run. Processes it starts are added to `children`, which the run closes."""

    def __init__(
        self, config: RunConfig, run_dir: Path, children: list[ChildProcess], inherit: tuple[int, ...]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._children = children
        self._inherit = inherit
        self._token = secrets.token_hex(16)
        """What our own engines want to see: other users of the machine reach the loopback address too."""
        self._processes: dict[EngineId, ChildProcess] = {}
        self._deaths: dict[EngineId, int] = {}
        self._back: dict[EngineId, asyncio.Event] = {}
        self._marks = FileMarks(run_dir)
        self._urls: dict[EngineId, str] = {}
        """Of servers: where each is, or was."""
        self._in_use: set[str] = set()
        """Addresses in use or being reached."""
        self.slots: dict[EngineId, EngineSlot] = {}

    async def start(
        self,
        version: Version,
        weights: Path,
        during: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Start or reach all of them, holding `version`, whose files are in `weights`. EngineError if one is not up.

        `during` is entered with what is being done.
        """
        section = self._config.engine
        count = section.replicas if isinstance(section, EmbeddedEngine) else len(section.urls)
        if self._router is not None:
            count = 1
            if self._is_blind:
                log.warning(
                    "engine.urls names the router alone: its servers' metrics are not known, so admission goes by "
                    "latency, and pauses and weights reach every server only if the router passes them on to each"
                )
        numbers = range(count)
        if not isinstance(section, EmbeddedEngine):
            self._urls = {self._name(n): url.rstrip("/") for n, url in enumerate(section.urls)}
            self._in_use = set(self._urls.values())
        is_ours = isinstance(section, EmbeddedEngine)
        with during(f"{'starting' if is_ours else 'reaching'} the engine{'s' * (count > 1)}"):
            engines = await asyncio.gather(*(self._open(n, version, weights) for n in numbers))
        for number, engine in zip(numbers, engines, strict=True):
            # A server that runs on from an earlier run holds that run's last weights, whatever their number.
            if engine.version != version or (not is_ours and (version or self._is_unsure_of(engine))):
                with during(f"loading v{version} into {engine.info.id}, and checking that it is in"):
                    await engine.update_weights(version, str(weights))
            self.slots[engine.info.id] = EngineSlot(engine, self._renewer(number))
        if not isinstance(section, EmbeddedEngine) and self._router is None:
            write_list(self._run_dir, tuple(self._urls.values()))

    async def follow_list(self, post: Callable[[Event], None], poll: Callable[[Engine], Poll]) -> None:
        """Read the engines' loads by `poll`, for ever; add and take out servers as the run's list of engines says."""
        async with asyncio.TaskGroup() as tasks:
            polls = {name: tasks.create_task(poll(slot)) for name, slot in self.slots.items()}
            if isinstance(self._config.engine, EmbeddedEngine) or self._router is not None:
                return
            draining: dict[EngineId, asyncio.Task[None]] = {}

            async def add(name: EngineId, url: str) -> None:
                if name in draining:
                    await draining[name]  # it was taken out a moment ago: its calls end first
                joined = await self._add(name, url)
                if joined is not None:
                    post(joined)
                    polls[name] = tasks.create_task(poll(self.slots[name]))

            def added(url: str) -> None:
                known = next((name for name, at in self._urls.items() if at == url), None)
                name = known or self._name(len(self._urls))
                self._urls[name] = url
                self._in_use.add(url)
                tasks.create_task(add(name, url))

            def removed(url: str) -> None:
                name = next(name for name, at in self._urls.items() if at == url)
                self._in_use.discard(url)
                if name in self.slots:
                    self.slots[name].leave()
                    post(EngineLost(name, f"{url} was taken out of {FILE}", leaves=True))
                    draining[name] = tasks.create_task(self._drain(name, polls.pop(name)))

            await follow(self._run_dir, lambda: set(self._in_use), added, removed)

    async def _add(self, name: EngineId, url: str) -> EngineJoined | None:
        """Reach a server that was added, however long it takes; None when it was taken out again meanwhile."""
        wait_s = 1.0
        while url in self._in_use:
            try:
                engine = await self._open(self._number(name), 0, self._initial)
                try:
                    if engine.version or name in self.slots:
                        # Whatever it holds is not of this run; the core then has it load the current weights.
                        await engine.update_weights(0, str(self._initial))
                except BaseException:
                    await engine.close()
                    raise
            except EngineError as error:
                log.warning("engine %s cannot be used yet, trying again in %.0f s: %s", name, wait_s, error)
                await asyncio.sleep(wait_s)
                wait_s = min(30.0, 2 * wait_s)
                continue
            if url not in self._in_use:
                await engine.close()
                return None
            self.slots[name] = EngineSlot(engine, self._renewer(self._number(name)))
            return EngineJoined(engine.info, 0)
        return None

    async def _drain(self, name: EngineId, poll: asyncio.Task[None]) -> None:
        """Close the client of a server that was taken out, once the calls under way have ended."""
        engine = self.slots[name].engine
        while isinstance(engine, HttpEngine | RouterEngine) and engine.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)
        poll.cancel()
        await engine.close()
        log.info("engine %s has been drained", name)

    def joined(self) -> list[EngineJoined]:
        """What the core is told at the start."""
        return [EngineJoined(slot.info, self._version_of(slot)) for slot in self.slots.values()]

    async def revive(self, engine: EngineId) -> EngineJoined:
        """Return once a lost engine is back."""
        joined = await self.slots[engine].revive()
        if engine in self._back:
            self._back[engine].set()
        return joined

    async def watch(self, engine: EngineId, lost: Callable[[EngineLost], None]) -> None:
        """Report each death of an engine's process; returns at once for one that is not ours.

        EngineError when it dies again and again.
        """
        while engine in self._processes:
            back = self._back[engine] = asyncio.Event()
            try:
                await self._processes[engine].wait_dead()
            except EngineError as error:
                self._deaths[engine] = self._deaths.get(engine, 0) + 1
                if self._deaths[engine] > MOST_RESTARTS:
                    raise EngineError(f"engine {engine} died {self._deaths[engine]} times: {error}") from None
                lost(EngineLost(engine, str(error)))
            # Also after it was closed, because it hung and is being started again.
            await back.wait()

    async def close(self) -> None:
        for slot in self.slots.values():
            await slot.close()

    # ── inside ──

    def _name(self, number: int) -> EngineId:
        return f"{self._config.engine.type}-{number}"

    def _number(self, name: EngineId) -> int:
        return int(name.rpartition("-")[2])

    @property
    def _initial(self) -> Path:
        """Weights of v0. Not of the version the run began with: a resumed run keeps that for a while only."""
        return resolve_model_dir(self._config.model.name)

    def _version_of(self, slot: EngineSlot) -> Version:
        engine = slot.engine
        return engine.version if isinstance(engine, HttpEngine | RouterEngine) else 0

    def _renewer(self, number: int) -> Callable[[], asyncio.Future[tuple[Engine, Version]]]:
        async def renew() -> tuple[Engine, Version]:
            engine = await self._open(number, 0, self._initial)
            return engine, engine.version

        return lambda: asyncio.ensure_future(renew())

    async def _open(self, number: int, version: Version, weights: Path) -> HttpEngine | RouterEngine:
        section = self._config.engine
        if isinstance(section, EmbeddedEngine):
            await self._close_process(number)
            child = await self._start_process(section, number, version, weights)
            return await self._connect(
                number,
                child.ready["url"],
                section.max_num_seqs,
                Limits(load_weights_s=section.load_s),
                self._token,
            )
        key = os.environ.get(section.api_key_env) if section.api_key_env else None
        limits = Limits(request_s=section.request_s, load_weights_s=section.load_s)
        if self._router is not None and not self._is_blind:
            return await self._connect_router(limits, key)
        url = self._urls[self._name(number)]
        return await self._connect(number, url, section.max_connections, limits, key)

    def _is_unsure_of(self, engine: HttpEngine | RouterEngine) -> bool:
        """Whether its weights may be half of one version and half of another, or not what it says."""
        if isinstance(engine, RouterEngine):
            return engine.is_mixed or any(map(self._marks.has, self._urls.values()))
        return self._marks.has(self._urls[engine.info.id])

    @property
    def _router(self) -> str | None:
        section = self._config.engine
        return section.router if isinstance(section, VllmEngine) else None

    @property
    def _is_blind(self) -> bool:
        """Whether nothing is known of the servers behind the router."""
        section = self._config.engine
        return isinstance(section, VllmEngine) and section.urls == (section.router,)

    async def _connect_router(self, limits: Limits, key: str | None) -> RouterEngine:
        section = self._config.engine
        assert isinstance(section, VllmEngine)
        assert section.router is not None
        return await connect_router(
            section.router,
            section.urls,
            id=self._name(0),
            served_name=self._config.model.served_name,
            max_connections=max(self._config.admission.most, section.max_connections),
            limits=limits,
            api_key=key,
            start_s=section.start_s,
            interrupt=section.inflight == "interrupt",
            check=ProbeCheck(section.probe_tolerance, read_probes),
            marks=self._marks,
        )

    async def _connect(
        self, number: int, url: str, connections: int, limits: Limits, key: str | None
    ) -> HttpEngine:
        section = self._config.engine
        reach: Callable[..., Any] = sglang.connect if isinstance(section, SglangEngine) else connect
        if self._is_blind:
            reach = partial(connect, is_router=True)
        engine: HttpEngine = await reach(
            url,
            id=self._name(number),
            served_name=self._config.model.served_name,
            max_connections=max(self._config.admission.most, connections),
            limits=limits,
            api_key=key,
            start_s=section.start_s,
            interrupt=section.inflight == "interrupt",
            check=ProbeCheck(section.probe_tolerance, read_probes),
            marks=None if isinstance(section, EmbeddedEngine) else self._marks,
        )
        return engine

    async def _close_process(self, number: int) -> None:
        """Whatever is left of the engine's last process; it may hang rather than be dead."""
        process = self._processes.get(self._name(number))
        if process is not None:
            await process.close(term_s=1.0)
            if process in self._children:  # not when the next one died before it was ready
                self._children.remove(process)

    async def _start_process(
        self, section: EmbeddedEngine, number: int, version: Version, weights: Path
    ) -> ChildProcess:
        options = EngineOptions(
            model=weights,
            served_model_name=self._config.model.served_name,
            kv_tokens=section.kv_tokens,
            block_size=section.block_size,
            max_num_seqs=section.max_num_seqs,
            max_batched_tokens=section.max_batched_tokens,
            max_model_len=section.max_model_len,
            dtype=section.dtype,
            batch_invariant=self._config.run.deterministic,
            seed=self._config.run.seed,
            weight_version=f"v{version}",
        )
        child = await ChildProcess.start(
            [sys.executable, "-m", "paceline.engines.embedded", *options.arguments()],
            name=f"engine-{number}",
            log_path=self._run_dir / "logs" / f"engine-{number}.log",
            start_s=section.start_s,
            env={TOKEN_VARIABLE: self._token},
            error=EngineError,
            inherit=self._inherit,
        )
        self._children.append(child)
        self._processes[self._name(number)] = child
        return child
