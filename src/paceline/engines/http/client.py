"""The Engine port over HTTP: vLLM, SGLang and the embedded engine, by their dialects.

    generate ─▶ a place (max_connections, waited for outside any deadline; a probe has one of its own kind)
                 └▶ try 1 ─▶ try 2 … under one deadline (request_s), each with a request id of its own
                     └▶ the place is free ─▶ a reply in doubt waits for the word about new weights (trust.py)
    abort    ─▶ the server is told to stop the try in flight; if the server lets it go on, the connection is closed

A try that may have reached the server is aborted there before another is made: never a silent duplicate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from paceline.domain.ids import EngineId, Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.engines.http.adapters import is_adapter
from paceline.engines.http.dialect import Dialect, Hears, VllmDialect
from paceline.engines.http.link import Answer, Limits, Link, LinkLost
from paceline.engines.http.probe import ServerFacts, probe
from paceline.engines.http.retry import NOT_JSON, Retry, is_transient
from paceline.engines.http.trust import Doubt, before
from paceline.engines.http.wire import decode, error_text
from paceline.errors import EngineBusy, EngineError, EngineUnavailable, ImpossibleLogprobs
from paceline.ports import GenerateReply, GenerateRequest, PauseMarks, WeightCheck

log = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}
_PROBES_AT_ONCE = 8
"""As many as a trainer publishes with a version; each samples one token."""

_ABORT_WAITS_S = (0.5, 2.0, 8.0)
"""How long an aborted request may take to come back, before it is aborted again, and in the end dropped. An
abort that overtakes its request on the way finds nothing to stop; the next one does."""


async def connect(
    url: str,
    *,
    id: EngineId,
    served_name: str,
    max_connections: int = 4096,
    limits: Limits | None = None,
    retry: Retry | None = None,
    api_key: str | None = None,
    start_s: float = 600.0,
    keep_kv: bool = False,
    interrupt: bool = False,
    check: WeightCheck | None = None,
    marks: PauseMarks | None = None,
    is_router: bool = False,
) -> HttpEngine:
    """Wait until the server at `url` answers, look at what it can do, and return the engine.

    `max_connections` is how many generate calls may be in flight, a few probes of new weights aside: at least the cap on
    rollouts. `interrupt`: calls in
    flight are aborted before new weights are loaded, with the tokens they have; else they go on under them. `is_router`:
    a router whose servers are not known; its metrics are not read. EngineError
    when it does not answer within `start_s`, serves no model `served_name`, or does not return token ids.
    """
    link = Link(url, f"engine {id} ({url})", limits or Limits(), retry or Retry(), api_key)
    try:
        facts = await probe(link, served_name, start_s=start_s)
        if facts.problems:
            raise EngineError("; ".join(map(str, facts.problems)))
    except BaseException:
        await link.close()
        raise
    dialect = VllmDialect(link, served_name, facts.route, keep_kv=keep_kv, marks=marks)
    return HttpEngine(
        link,
        id,
        msgspec.structs.replace(facts, kv_tokens=None) if is_router else facts,
        dialect,
        max_connections=max_connections,
        interrupt=interrupt,
        check=check,
        says_load=not is_router,
    )


class _Flight:
    """One request on its way: what an abort needs to reach it."""

    __slots__ = ("aborted", "backoff", "doubt", "ended", "stamped", "timer", "wire_id")

    def __init__(self, wire_id: str) -> None:
        self.wire_id = wire_id
        self.aborted = False
        self.timer: asyncio.Timeout | None = None
        """Of the try in flight."""
        self.backoff: asyncio.Future[None] | None = None
        """Set while no try is in flight."""
        self.ended: asyncio.Future[None] | None = None
        """Set once somebody waits for the end."""
        self.doubt: Doubt | None = None
        """About weights that were loaded while it was in flight."""
        self.stamped: Callable[[Version], GenerateReply] | None = None
        """The reply again, with another version for what the server did not stamp; None of one that was dropped."""

    async def trusted(self, reply: GenerateReply) -> GenerateReply:
        """What of its reply may be believed; waits where that is being found out."""
        if self.doubt is None or self.stamped is None:
            return reply
        sure = before(self.stamped(self.doubt.version), self.doubt.version)
        if len(sure.token_ids) == len(reply.token_ids) or await self.doubt.is_trusted():
            return reply
        return sure

    def drop(self) -> None:
        """End the try now; the server sees its connection close."""
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time())


class HttpEngine:
    """One server behind the Engine port. Made by `connect`."""

    def __init__(
        self,
        link: Link,
        id: EngineId,
        facts: ServerFacts,
        dialect: Dialect,
        *,
        max_connections: int,
        interrupt: bool = False,
        check: WeightCheck | None = None,
        controls: Sequence[Link] = (),
        says_load: bool = True,
    ) -> None:
        """`controls`: where an abort has to go when that is not where calls go: the servers behind a router.
        `says_load` False: its metrics are those of one of several servers, and are not read."""
        self._controls = tuple(controls) or (link,)
        self._says_load = says_load
        self._link, self._dialect, self._facts = link, dialect, facts
        self._info = EngineInfo(id=id, kv_tokens=facts.kv_tokens, max_model_len=facts.max_model_len)
        self._version: Version = facts.version or 0
        self._route = dialect.route
        self._places = asyncio.Semaphore(max_connections)
        # A load ends when its probes are answered. Behind the calls in flight they would wait for the longest generation,
        # and for ever where those calls have ended and wait for what the probes find out.
        self._probes = _Probes(self)
        self._flights: dict[str, _Flight] = {}
        self._doubt: Doubt | None = None
        """The last there was."""
        self._check = check
        self._loading = asyncio.Lock()
        self._interrupt = interrupt
        self._takes_calls = True
        """False while weights are loaded that no call may span."""
        self._can_abort = True

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def facts(self) -> ServerFacts:
        """What the start-up probe saw."""
        return self._facts

    @property
    def version(self) -> Version:
        """What the server holds: as it said at the start, then the last version loaded into it."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Generate calls that hold a place: not those that wait for one, or for the word about new weights."""
        return len(self._flights)

    @property
    def is_busy(self) -> bool:
        """Whether calls are in flight, or weights are being loaded."""
        return bool(self._flights) or self._loading.locked()

    @property
    def link(self) -> Link:
        """The way to the server."""
        return self._link

    def holds(self, version: Version) -> None:
        """What the servers hold, as somebody knows who loads them."""
        self._version = version

    @asynccontextmanager
    async def held_off(self) -> AsyncIterator[None]:
        """For as long as weights are loaded by somebody else: what is in flight is interrupted, where that is asked for,
        and nothing new is sent."""
        async with self._loading:
            try:
                if self._interrupt:
                    self._takes_calls = False
                    await self.interrupt()
                yield
            finally:
                self._takes_calls = True

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._generate(request, self._places)

    async def _generate(
        self, request: GenerateRequest, places: asyncio.Semaphore, *, is_probe: bool = False
    ) -> GenerateReply:
        async with places:
            if not self._takes_calls:
                return _NOTHING  # granted in the moment before: it asks the gate again
            if request.request_id in self._flights:
                raise EngineError(f"{self._link.name}: request {request.request_id} is in flight already")
            flight = self._flights[request.request_id] = _Flight(request.request_id)
            if not is_probe and self._doubt is not None and self._doubt.is_open:
                flight.doubt = self._doubt  # it waited for a place while the weights came in
            try:
                reply = await self._tries(request, flight)
            finally:
                del self._flights[request.request_id]
                if flight.ended is not None and not flight.ended.done():
                    flight.ended.set_result(None)
        # The server is done with it. To keep the place would keep it from calls that nothing else is in the way of.
        return await flight.trusted(reply)

    async def abort(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.aborted = True
        if flight.backoff is not None and not flight.backoff.done():
            flight.backoff.set_result(None)
        loop = asyncio.get_running_loop()
        if flight.ended is None:
            flight.ended = loop.create_future()
        for wait_s in _ABORT_WAITS_S:
            if not self._can_abort or not await self._abort_there(flight.wire_id):
                break
            await asyncio.wait((flight.ended,), timeout=wait_s)
            if flight.ended.done():
                return
        flight.drop()

    async def interrupt(self) -> None:
        """End all calls in flight with the tokens they have."""
        await asyncio.gather(*(self.abort(request) for request in list(self._flights)))

    def doubt(self, version: Version) -> Doubt:
        """Until it is settled, calls that `version` may have sampled for wait for it: those in flight, and those that begin."""
        doubt = self._doubt = Doubt(version)
        for flight in self._flights.values():
            if flight.doubt is None or flight.doubt.is_settled_well:
                flight.doubt = doubt
        return doubt

    async def load(self) -> EngineLoad:
        link = self._link
        if not self._says_load:
            raise EngineError(f"{link.name}: is a router, whose metrics say nothing of the servers behind it")
        try:
            async with asyncio.timeout(link.limits.metrics_s):
                answer = await link.send("GET", "/metrics")
            if answer.status != 200:
                raise EngineError(f"answered {answer.status}")
            return self._dialect.read_load(answer.body)
        except TimeoutError:
            raise EngineError(
                f"{link.name}: /metrics gave no answer within {link.limits.metrics_s:g} s"
            ) from None
        except (LinkLost, EngineError) as error:
            raise EngineError(f"{link.name}: /metrics: {error}") from error

    async def update_weights(
        self, version: Version, path: str, interrupt: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`interrupt` ends the calls that the server has in flight, where they are somebody else's: a router's."""
        async with self._loading:
            limit_s = self._link.limits.load_weights_s
            try:
                async with asyncio.timeout(limit_s):
                    await self._update(version, path, interrupt or self.interrupt)
            except TimeoutError:
                raise EngineUnavailable(
                    f"{self._link.name}: v{version} was not in within {limit_s:g} s (engine.load_s)"
                ) from None
            self._version = version

    async def close(self) -> None:
        """Closes every connection; the server aborts what was still in flight."""
        await self._link.close()

    async def _update(self, version: Version, path: str, interrupt: Callable[[], Awaitable[None]]) -> None:
        check = self._check
        if check is not None:
            await check.before(path)
        # Calls go on under the adapter they began with: nothing of theirs is in doubt.
        doubt = None if check is None or is_adapter(path) else self.doubt(version)
        is_trusted = True
        try:
            try:
                if self._interrupt:
                    self._takes_calls = False
                    await self.interrupt()
                await self._dialect.load_weights(version, path, interrupt)
            finally:
                self._takes_calls = True
            if check is not None:
                # It works again by now: in-flight requests go on meanwhile, new turns wait.
                is_trusted = False
                await check.after(self._probes, version, path)
                is_trusted = True
        finally:
            if doubt is not None:
                doubt.settle(is_trusted)
            if not is_trusted:
                self._dialect.take_back()
                if doubt is not None:
                    await interrupt()

    async def probe(self, request: GenerateRequest, places: asyncio.Semaphore) -> GenerateReply:
        """A call about weights that are in doubt: it has one of `places`, and its reply is handed over at once."""
        return await self._generate(request, places, is_probe=True)

    # ---- one request

    async def _tries(self, request: GenerateRequest, flight: _Flight) -> GenerateReply:
        link, loop = self._link, asyncio.get_running_loop()
        headers = {**_JSON, "X-Session-ID": request.session} if request.session else _JSON
        deadline = loop.time() + link.limits.request_s
        failed = 0
        while True:
            if failed:
                flight.wire_id = f"{request.request_id}~{failed + 1}"
            heard = None if request.tell is None else self._dialect.listen(request.tell)
            body = self._dialect.encode(request, flight.wire_id)
            known = self._dialect.stamp(self._version)
            wait_s: float | None
            kind: type[EngineError] = EngineError
            try:
                async with asyncio.timeout_at(deadline) as flight.timer:
                    if heard is None:
                        answer = await link.send("POST", self._route, body, headers)
                    else:
                        answer = await link.send("POST", self._route, body, headers, heard.take)
                        if heard.is_begun:
                            flight.stamped = heard.whole
                            return heard.whole(known)
            except TimeoutError:
                if not flight.aborted:
                    await self._stop(flight.wire_id)
                if heard is not None and heard.tokens:
                    return self._kept(heard, known, flight)
                if flight.aborted:
                    return _NOTHING
                raise self._error(
                    f"no answer within {link.limits.request_s:g} s (request_s)", EngineUnavailable
                ) from None
            except EngineError as error:  # of what a stream said
                raise self._named(error) from None
            except LinkLost as lost:
                failed += 1
                if heard is not None and heard.tokens:
                    # Told already, so not to be sampled again: the turn goes on from there.
                    if not flight.aborted:
                        await self._stop(flight.wire_id)
                    return self._kept(heard, known, flight)
                if flight.aborted:
                    return _NOTHING
                cause, wait_s = str(lost), link.retry.wait_s(failed)
                if lost.arrived and wait_s is not None and not await self._stop(flight.wire_id):
                    raise self._error(
                        f"{cause}; it may still be at work on the request", EngineUnavailable
                    ) from lost
                kind = EngineUnavailable
            else:
                if answer.status == 200:
                    return self._decoded(answer, known, flight)
                failed += 1
                cause, wait_s = self._refused(answer, failed)
                if NOT_JSON in answer.body:
                    raise self._named(
                        ImpossibleLogprobs(f"{cause} (a logprob was not finite)", bad=1, tokens=1)
                    )
                transient = is_transient(answer.status, answer.body)
                busy = EngineBusy if answer.status == 429 else EngineUnavailable
                kind = busy if transient else EngineError
            finally:
                flight.timer = None
            if wait_s is None or loop.time() + wait_s >= deadline:
                raise self._error(f"{cause} (try {failed})", kind)
            log.info("%s: %s; trying again in %.1f s", link.name, cause, wait_s)
            if not flight.aborted:
                flight.backoff = loop.create_future()
                await asyncio.wait((flight.backoff,), timeout=wait_s)
                flight.backoff = None
            if flight.aborted:
                return _NOTHING

    def _decoded(self, answer: Answer, known: Version, flight: _Flight) -> GenerateReply:
        flight.stamped = partial(self._dialect.decode, answer.body)
        try:
            # A server that does not stamp its tokens may have loaded weights meanwhile: then the older version
            # is taken for all of them, so that staleness is never understated.
            return self._dialect.decode(answer.body, known)
        except EngineError as error:
            raise self._named(error) from None

    def _kept(self, heard: Hears, known: Version, flight: _Flight) -> GenerateReply:
        flight.stamped = heard.kept
        try:
            return heard.kept(known)
        except EngineError as error:
            raise self._named(error) from None

    def _refused(self, answer: Answer, failed: int) -> tuple[str, float | None]:
        cause = f"answered {answer.status}: {error_text(answer.body) or 'without a word'}"
        if not is_transient(answer.status, answer.body):
            return cause, None
        return cause, self._link.retry.wait_s(failed, answer.retry_after_s)

    def _error(self, cause: str, kind: type[EngineError] = EngineError) -> EngineError:
        return kind(f"{self._link.name}: {self._route}: {cause}")

    def _named(self, error: EngineError) -> EngineError:
        """What is wrong with a reply, with the engine's name in front."""
        named = self._error(str(error))
        if isinstance(error, ImpossibleLogprobs):
            return ImpossibleLogprobs(str(named), bad=error.bad, tokens=error.tokens)
        return named

    # ---- stopping

    async def _stop(self, wire_id: str) -> bool:
        """Make sure that a try whose connection is gone samples no more. False when that is unknown."""
        if not self._can_abort:
            return True  # closing the connection has aborted it
        return await self._abort_there(wire_id)

    async def _abort_there(self, wire_id: str) -> bool:
        """Whether the server has taken the abort, or is not there to sample anything."""
        taken = await asyncio.gather(*(self._abort_at(link, wire_id) for link in self._controls))
        return all(taken)

    async def _abort_at(self, link: Link, wire_id: str) -> bool:
        path, body = self._dialect.abort_call(wire_id)
        try:
            async with asyncio.timeout(link.limits.metrics_s):
                answer = await link.send("POST", path, body)
        except TimeoutError:
            return False
        except LinkLost as lost:
            return not lost.arrived
        if answer.is_missing:
            self._can_abort = False
            log.warning(
                "%s: has no %s (%s): aborting closes connections, and loses their tokens",
                link.name,
                path,
                self._dialect.no_abort,
            )
        return answer.status == 200 or answer.is_missing


class _Probes:
    """The engine as the check of its weights has it: what that asks waits for no call in flight."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine, self._places = engine, asyncio.Semaphore(_PROBES_AT_ONCE)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._engine.probe(request, self._places)


_NOTHING = decode(b'{"choices":[{"token_ids":[],"finish_reason":"abort"}]}', 0)
"""Of a request that was dropped."""
