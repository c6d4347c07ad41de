"""What differs between servers, behind one client: bodies, routes, metrics, and how weights get in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from paceline.domain.ids import Version
from paceline.domain.load import EngineLoad
from paceline.engines.http import wire
from paceline.engines.http.adapters import Adapter, AdapterLoader, is_adapter
from paceline.engines.http.link import Link
from paceline.engines.http.metrics import read_load
from paceline.engines.http.streams import Heard
from paceline.engines.http.weights import WeightLoader
from paceline.ports import GenerateReply, GenerateRequest, PauseMarks


class Hears(Protocol):
    """What the stream of one attempt has said so far."""

    @property
    def is_begun(self) -> bool:
        """Whether the answer is a stream at all."""
        ...

    @property
    def tokens(self) -> int:
        """How many were told."""
        ...

    def take(self, data: bytes) -> None:
        """One event. Raises LinkLost when the server breaks off, EngineError for what cannot be read."""
        ...

    def whole(self, known: Version) -> GenerateReply:
        """The reply, checked. Raises LinkLost when the stream ended before it was whole, and as `Dialect.decode`."""
        ...

    def kept(self, known: Version) -> GenerateReply:
        """What there is, as of a request that was aborted."""
        ...


class Dialect(Protocol):
    """One server's way of saying things."""

    @property
    def route(self) -> str:
        """Where generate calls go."""
        ...

    @property
    def no_abort(self) -> str:
        """Why a server may not know `abort_call`, and what to do about it."""
        ...

    def encode(self, request: GenerateRequest, wire_id: str) -> bytes:
        """The body of one attempt at `request`."""
        ...

    def decode(self, body: bytes, known: Version) -> GenerateReply:
        """The reply, checked. `known` stamps tokens whose sampler the server does not name. Raises EngineError."""
        ...

    def listen(self, tell: Callable[[Sequence[int]], None]) -> Hears | None:
        """Hears the stream of the attempt that is encoded next; None where replies come whole whatever is asked."""
        ...

    def abort_call(self, wire_id: str) -> tuple[str, bytes]:
        """Route and body that stop an attempt."""
        ...

    def read_load(self, page: bytes) -> EngineLoad:
        """What the metrics page says. Raises EngineError."""
        ...

    async def load_weights(self, version: Version, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Pause, load, label, check the label, resume. Raises EngineError; where a load was begun, after `stop`, which
        ends the calls in flight before a server works again whose weights may be anything."""
        ...

    def stamp(self, held: Version) -> Version:
        """The version that the next call is sampled under, where the engine holds `held`."""
        ...

    def take_back(self) -> None:
        """What `load_weights` last gave is not to be trusted: calls go to what was there before."""
        ...


class VllmDialect:
    """A vLLM server, or the embedded one."""

    no_abort = "VLLM_SERVER_DEV_MODE=1"

    def __init__(
        self,
        link: Link,
        model: str,
        route: str,
        *,
        keep_kv: bool = False,
        marks: PauseMarks | None = None,
    ) -> None:
        self.route, self._model = route, model
        self._adapter: Adapter | None = None
        self._before: Adapter | None = None
        self._loader = WeightLoader(link, keep_kv=keep_kv, marks=marks)
        self._adapters = AdapterLoader(link, model)

    def encode(self, request: GenerateRequest, wire_id: str) -> bytes:
        model = self._model if self._adapter is None else self._adapter.name
        return wire.encode(request, wire_id, self.route, model)

    def decode(self, body: bytes, known: Version) -> GenerateReply:
        return wire.decode(body, known, spans=self._adapter is None)

    def listen(self, tell: Callable[[Sequence[int]], None]) -> Heard | None:
        return Heard(tell, spans=self._adapter is None)

    def stamp(self, held: Version) -> Version:
        return held if self._adapter is None else self._adapter.version

    def take_back(self) -> None:
        self._adapter = self._before

    def abort_call(self, wire_id: str) -> tuple[str, bytes]:
        # The server gives a request a name of its own, made of ours.
        ids: tuple[str, ...] = (wire_id, f"generate-tokens-{wire_id}")
        if self.route == wire.COMPLETIONS:
            ids = (wire_id, f"cmpl-{wire_id}", f"cmpl-{wire_id}-0")
        return "/abort_requests", msgspec.json.encode({"request_ids": ids})

    def read_load(self, page: bytes) -> EngineLoad:
        return read_load(page)

    async def load_weights(self, version: Version, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        self._before = self._adapter
        if is_adapter(path):
            self._adapter = await self._adapters.load(version, path)
        else:
            await self._loader.load(version, path, stop)
            self._adapter = None
