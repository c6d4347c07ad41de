"""Both ends of a worker process's connection: frames over a socket pair.

What is said within one turn of a loop goes out as one frame: a burst of replies costs one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from paceline.envs.workers import wire
from paceline.envs.workers.worker import Worker

_BUFFER = 2**20


class Outbound:
    """Collects records and writes them once a turn of the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._records: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, record: Any) -> None:
        """Never blocks; what cannot be delivered any more is dropped. TypeError for what is not JSON-like, TooLarge for
        what no frame holds."""
        encoded = wire.encoded(record)
        if not self._records:
            self._loop.call_soon(self.flush)
        self._records.append(encoded)

    def flush(self) -> None:
        records, self._records = self._records, []
        for frame in wire.frames(records):
            if not self._writer.is_closing():
                self._writer.write(frame)


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body; None at the end of the stream. EnvError for what is no frame."""
    try:
        head = await reader.readexactly(wire.LENGTH_BYTES)
        return await reader.readexactly(wire.length_of(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def connect(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over a socket that is connected already."""
    connection.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return await asyncio.open_unix_connection(sock=connection, limit=_BUFFER)


async def serve(connection: socket.socket) -> None:
    """The worker's side: until it is told to close, or nobody is there to tell it."""
    reader, writer = await connect(connection)
    out = Outbound(writer)
    worker = Worker(out.send)
    loop = asyncio.get_running_loop()

    async def listen() -> None:
        while (body := await read_body(reader)) is not None:
            for record in wire.for_worker(body):
                worker.take(record)

    tasks = [
        loop.create_task(listen()),
        loop.create_task(worker.beat()),
        loop.create_task(worker.closed.wait()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        out.flush()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.drain()
        writer.close()
