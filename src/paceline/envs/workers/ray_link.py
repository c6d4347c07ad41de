"""Workers as Ray actors: the same worker, its frames carried by calls of the actor.

    deliver(frame)            orchestrator ──▶ worker; not awaited, so a burst is a burst
    frame = await collect()   worker ──▶ orchestrator: waits until there is something to say

Ray places, starts and buries the actors; restarting them is the pool's business (`max_restarts = 0`), since a worker
that comes back does not know its rollouts. What Ray pickles is bytes of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from paceline.config.workers import RayWorkers
from paceline.envs.workers import wire
from paceline.envs.workers.worker import Worker
from paceline.errors import ConfigError, EnvError


class HostedWorker:
    """The actor's class. Ray runs its coroutines on one event loop, side by side."""

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._frames: deque[bytes] = deque()
        """On their way: more was said at once than a frame holds."""
        self._something = asyncio.Event()
        self._worker = Worker(self._send)
        self._beat: asyncio.Task[None] | None = None

    def _send(self, record: Any) -> None:
        self._out.append(wire.encoded(record))
        self._something.set()

    async def deliver(self, frame: bytes) -> None:
        """Take records in."""
        if self._beat is None:
            self._beat = asyncio.get_running_loop().create_task(self._worker.beat())
        for record in wire.for_worker(frame[wire.LENGTH_BYTES :]):
            self._worker.take(record)

    async def collect(self) -> bytes:
        """What there is to say, once there is something; empty when the worker has closed."""
        if self._frames:
            return self._frames.popleft()
        closed = asyncio.ensure_future(self._worker.closed.wait())
        said = asyncio.ensure_future(self._something.wait())
        try:
            await asyncio.wait((closed, said), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            said.cancel()
        await asyncio.sleep(0)  # what is said in the same turn goes with it
        self._something.clear()
        records, self._out = self._out, []
        self._frames.extend(wire.frames(records))
        return self._frames.popleft() if self._frames else b""


class RayLink:
    """A connection to one actor."""

    def __init__(self, ray: Any, name: str, actor: Any) -> None:
        self._ray = ray
        self._name = name
        self._actor = actor
        self._records: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._why = ""

    def send(self, record: wire.ToWorker) -> None:
        encoded = wire.encoded(record)
        if not self._records:
            self._loop.call_soon(self._flush)
        self._records.append(encoded)

    def _flush(self) -> None:
        records, self._records = self._records, []
        for frame in wire.frames(records):
            if not self._ended.is_set():
                self._actor.deliver.remote(frame)

    async def receive(self) -> list[wire.FromWorker] | None:
        try:
            frame = await self._actor.collect.remote()
        except self._ray.exceptions.RayError as error:
            self._end(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            return None
        if not frame:
            self._end("closed")
            return None
        return wire.from_worker(bytes(frame)[wire.LENGTH_BYTES :])

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._ended.set()

    async def close(self, within_s: float) -> str:
        self._flush()
        if within_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._ended.wait()
        await asyncio.to_thread(self._ray.kill, self._actor, no_restart=True)
        self._end("killed")
        return f"{self._name}: {self._why}"


class RayLauncher:
    """Starts actors, on whichever hosts have what they occupy. ConfigError where Ray is not installed."""

    def __init__(self, settings: RayWorkers) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "workers.type = \"ray\" needs Ray, which is not installed: pip install 'paceline[ray]'"
            ) from error
        self._ray: Any = ray
        self._settings = settings

    async def __call__(self, name: str) -> RayLink:
        if not self._ray.is_initialized():
            await asyncio.to_thread(self._join)
        settings = self._settings
        options: dict[str, Any] = {
            "num_cpus": settings.cpus,
            "resources": dict(settings.resources),
            "max_restarts": 0,
            # One call of `collect` is always waiting, and `deliver` does not wait.
            "max_concurrency": 1000,
        }
        if settings.memory_mb is not None:
            options["memory"] = settings.memory_mb << 20
        hosted = self._ray.remote(HostedWorker).options(**options)
        return RayLink(self._ray, name, hosted.remote())

    def _join(self) -> None:
        settings = self._settings
        try:
            self._ray.init(
                address=settings.address,
                log_to_driver=False,
                include_dashboard=False,
                configure_logging=False,
                ignore_reinit_error=True,
            )
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            where = settings.address or "this machine"
            raise EnvError(f"Ray on {where} (workers.address) cannot be had: {error}") from error
