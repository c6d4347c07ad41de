"""One tab of a real headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1400,1000",
]


class Tab:
    """Opens `url`; `complaints` collects what the console and the page's exceptions said."""

    def __init__(self, chromium: str, profile: Path, url: str) -> None:
        self._command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._url = url
        self._ids = itertools.count(1)
        self.complaints: list[str] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(*self._command, stderr=asyncio.subprocess.PIPE)
        assert self._process.stderr
        while not (found := re.search(rb"ws://[^:]+:(\d+)/", await self._process.stderr.readline())):
            pass
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{int(found[1])}/json") as reply:
            tab = next(tab for tab in await reply.json() if tab["type"] == "page")
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=self._url)
        while not await self.value("document.readyState === 'complete' && !!document.querySelector('svg')"):
            pass
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        self._process.terminate()
        # Its helpers hold the pipe for a moment: read it to the end, or its transport outlives the loop.
        await self._process.communicate()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                return dict(message["result"])
            if message.get("method") in (
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
            ):
                self.complaints.append(str(message["params"]))

    async def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def _place(self, selector: str) -> tuple[float, float, float, float]:
        x, y, width, height = await self.value(
            f"(() => {{ const n = document.querySelector('{selector}'); n.scrollIntoView({{block: 'center'}}); "
            "const r = n.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
        )
        return x, y, width, height

    async def move(self, selector: str, across: float, down: float) -> None:
        """Put the mouse over an element, at shares of its width and height."""
        x, y, width, height = await self._place(selector)
        await self._mouse("mouseMoved", x + across * width, y + down * height)

    async def drag(self, selector: str, start: float, end: float) -> None:
        x, y, width, height = await self._place(selector)
        for kind, at in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            await self._mouse(kind, x + at * width, y + height / 2)

    async def _mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    async def point_of_a_lane(self) -> tuple[float, float]:
        """Where in the timeline's canvas a model call is drawn, as shares of its size."""
        across, down = await self.value(
            """(() => {
              const c = document.querySelector('canvas'), g = c.getContext('2d'), blue = color('model0');
              const want = [1, 3, 5].map((i) => parseInt(blue.slice(i, i + 2), 16));
              const {data} = g.getImageData(0, 0, c.width, c.height);
              for (let y = 115; y < c.height; y++) for (let x = 100; x < c.width - 6; x++) {
                const i = 4 * (y * c.width + x + 3);
                if (want.every((v, k) => data[i + k] === v) && want.every((v, k) => data[i + 8 + k] === v)) {
                  return [(x + 3) / c.width, (y + 1) / c.height];
                }
              }
              return [0, 0];
            })()"""
        )
        return across, down
