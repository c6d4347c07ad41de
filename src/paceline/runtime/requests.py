"""One engine request of a rollout: waited for at the turn gate, sent, checked, and reported when it ends.

TurnRequested ─▶ gate ─▶ GrantTurn ─▶ engine.generate ─▶ checked ─▶ SegmentEnded
                  └─ stopped meanwhile: the grant is given back ────────▲
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from paceline.domain.commands import GrantTurn
from paceline.domain.events import SegmentEnded
from paceline.domain.ids import EngineId, RolloutId
from paceline.envs.protocol import RolloutTruncated
from paceline.envs.recorder import Recorder
from paceline.errors import EngineBusy, EngineError, EngineUnavailable, ImpossibleLogprobs, ModelCallFailed
from paceline.ports import Engine, GenerateReply, GenerateRequest
from paceline.runtime.calls import Calls, EnvRuntime
from paceline.runtime.chain import Chain
from paceline.runtime.gate import TurnGate
from paceline.runtime.impossible import ImpossibleWatch
from paceline.runtime.replies import check_reply, told


class EngineRequests(Calls):
    """What of a rollout's calls is between the gate and its engine."""

    __slots__ = ("_clock", "_engines", "_gate", "_impossible", "_parked", "_rollout")

    recorder: Recorder

    def __init__(
        self,
        rollout: RolloutId,
        shared: EnvRuntime,
        max_context: int | None,
        engines: Mapping[EngineId, Engine],
        gate: TurnGate,
        clock: Callable[[], float],
        impossible: ImpossibleWatch,
    ) -> None:
        super().__init__(shared, Recorder(), max_context)
        self._rollout = rollout
        self._engines = engines
        self._gate = gate
        self._clock = clock
        self._impossible = impossible
        self._parked = False
        """Set when it is parked in the moment between a grant and the request: the request is not sent."""

    def park(self) -> None:
        """The core wants its engine's place back. What has not been granted yet is held at the gate anyway."""
        if self.pending is not None and self.pending.done():
            self._parked = True

    # ── the gate ──

    async def _wait(self, future: asyncio.Future[GrantTurn]) -> None:
        """Until the gate grants the turn. RolloutTruncated when a limit ends the wait."""
        self.where, self.pending = "gate", future
        if self.stop is not None:
            future.cancel()  # its own request brought that about: whoever cancelled found no wait to end
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self._return(future.result())  # granted in the very moment
            elif self.stop is None and self.limit is None:
                # Its request stays with the core; a second one would be a second call at the same time.
                self._poison = (
                    "the environment gave up a model call that was waiting at the turn gate, and makes another: "
                    "leave timing out to limits.deadline_s"
                )
            if self.stop is None and self.limit is not None:
                raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}") from None
            raise
        finally:
            self.where, self.pending = "env", None

    def _accepted(self, grant: GrantTurn) -> GrantTurn:
        """The grant, unless the rollout was stopped in the same moment."""
        if self.stop is not None:
            self._return(grant)
            raise asyncio.CancelledError
        if self.limit is not None:
            self._return(grant)
            raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}")
        return grant

    def _return(self, grant: GrantTurn) -> None:
        """A grant that is not used is answered too."""
        self._gate.report(SegmentEnded(self._rollout, grant.engine, (), "abort"))

    async def _sit_out(self, chain: Chain, seconds: float) -> None:
        """Wait; the rollout may be stopped meanwhile, as it may at the gate."""
        began, loop = self._clock(), asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def is_over() -> None:
            if not over.done():
                over.set_result(None)

        timer = loop.call_later(seconds, is_over)
        self.where, self.pending = "gate", over
        try:
            await over
        except asyncio.CancelledError:
            if self.stop is None and self.limit is not None:
                raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}") from None
            raise
        finally:
            timer.cancel()
            self.where, self.pending = "env", None
            self.gate_s += self._clock() - began
            chain.queued_s += self._clock() - began

    # ── the engine ──

    async def _generate(self, grant: GrantTurn, request: GenerateRequest) -> GenerateReply:
        """Send one request; its end is reported, however it ends. ModelCallFailed where no other engine can help."""
        began = self._clock()
        engine = self._engines.get(grant.engine)
        try:
            if engine is None:
                raise EngineError(f"engine {grant.engine!r} is gone")
            self.where, self.engine, self.request_id = "engine", engine, request.request_id
            reply = check_reply(await engine.generate(request), request.sampling.max_tokens)
        except BaseException as error:
            # Before the report: what it brings about finds no call here.
            self.where, self.engine = "env", None
            took = self._clock() - began
            self.model_s += took
            cancelled = not isinstance(error, Exception)
            if cancelled and self.stop is None and self.limit is None:
                # An environment's own time limit. Three of them in a row must not look like an engine that fails.
                self._gate.report(
                    SegmentEnded(self._rollout, grant.engine, (), "abort", 0, took, given_up=True)
                )
                raise
            text = "cancelled while it ran" if cancelled else told(error, grant.engine)
            if isinstance(error, ImpossibleLogprobs):
                self._impossible.refused(grant.engine, error)
            busy = isinstance(error, EngineBusy)
            outage = isinstance(error, EngineUnavailable) and not busy
            self._gate.report(
                SegmentEnded(
                    self._rollout, grant.engine, (), "abort", 0, took, text, is_outage=outage, is_busy=busy
                )
            )
            if cancelled or isinstance(error, EngineUnavailable):
                raise
            self.engine_error = text
            raise ModelCallFailed(text) from error
        finally:
            self.where, self.engine = "env", None
        self._impossible.sampled(grant.engine, len(reply.token_ids))
        took = self._clock() - began
        self.model_s += took
        self._gate.report(
            SegmentEnded(self._rollout, grant.engine, reply.versions, reply.finish, reply.cached_tokens, took)
        )
        return reply
