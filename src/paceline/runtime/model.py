"""The policy as one rollout sees it: chat in, exact ids recorded.

A model call is a chain of engine requests, each of which extends exactly the ids so far. Each asks the turn gate, and
each is reported when it ends. An engine that stops a request of its own accord (to load weights, or to park the rollout)
hands back what it sampled, and the chain goes on from there. A rollout of an earlier life is answered from its record
first (`keeping`).

    chat ─▶ bridge: the ids to add ─▶ recorder: the whole context
         ─▶ gate ─▶ engine.generate ─▶ checked, recorded, reported ─┐
             ▲                                                       │ finish `abort`, nobody asked for it
             └───────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.config.environment import Limits
from paceline.core.streams import mix
from paceline.domain.commands import ContinueRollout, GrantTurn, StartRollout
from paceline.domain.events import RolloutContinued, TurnRequested
from paceline.domain.ids import EngineId
from paceline.domain.part import Asked, Part
from paceline.domain.rollout import Finish, Message
from paceline.envs.endpoint import Endpoint
from paceline.envs.protocol import (
    ChatMessage,
    Reply,
    RolloutTruncated,
    Says,
    messages_of,
)
from paceline.envs.recorder import NO_IDS
from paceline.errors import (
    EngineError,
    EngineUnavailable,
    EnvError,
    InvariantError,
    ModelCallFailed,
)
from paceline.ports import Engine, GenerateRequest, SamplingParams
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.chain import Chain, Tell
from paceline.runtime.gate import TurnGate
from paceline.runtime.gateway.server import Gateway
from paceline.runtime.impossible import ImpossibleWatch
from paceline.runtime.keeping import Keeping
from paceline.runtime.requests import EngineRequests
from paceline.tokens import ChatTokenizer, Conversation, Plan
from paceline.tokens.marks import first_mark, may_be_in
from paceline.tokens.messages import words_of

LONG_TEXT: Final = 20_000
"""Characters from which encoding leaves the loop: about 5 ms of work, against 22 µs for the hop."""

EMPTY_ABORTS: Final = 32
"""Engine requests in a row that may be aborted without a token before the engine counts as failed: a chain that
never gets anywhere must end."""

Ids: TypeAlias = NDArray[np.int32]
Launch: TypeAlias = StartRollout | ContinueRollout
"""What a rollout is begun with."""


class ModelCalls(EngineRequests):
    """The `Model` of one rollout: conversation, recorder and budgets."""

    __slots__ = (
        "_bridge",
        "_conversation",
        "_gateway",
        "_hung_up",
        "_keeping",
        "_mark",
        "_name",
        "_noise_by_position",
        "_noise_seed",
        "_session",
        "_stop_ids",
    )

    def __init__(
        self,
        command: Launch,
        shared: EnvRuntime,
        engines: Mapping[EngineId, Engine],
        gate: TurnGate,
        clock: Callable[[], float],
        *,
        noise_by_position: bool,
        impossible: ImpossibleWatch,
        gateway: Gateway | None = None,
        parts: Sequence[Part] = (),
        keep: Callable[[Part], None] | None = None,
        on_record_end: Callable[[RolloutContinued, str], None] = lambda event, strayed: None,
    ) -> None:
        """`parts`, `keep` and `on_record_end` are as in `Keeping`."""
        self._name = str(command.rollout)
        self._session = f"g{command.rollout.group}"
        self._noise_seed = command.noise_seed
        most = _max_context(shared.limits, engines.get(command.engine))
        super().__init__(command.rollout, shared, most, engines, gate, clock, impossible)
        bridge = shared.bridge
        if bridge is None:
            raise InvariantError(
                f"rollout {command.rollout} is to be sampled on an engine, and has no tokenizer"
            )
        self._bridge = bridge
        self._stop_ids = bridge.tokenizer.stop_ids
        self._noise_by_position = noise_by_position
        self._conversation = Conversation(bridge)
        self._gateway = gateway
        self._hung_up = False
        self._keeping = Keeping(command, parts, keep, on_record_end)
        # An engine may still be busy with the request that the earlier life had under way.
        self._mark = f"-{round(1000 * clock()):x}" if isinstance(command, ContinueRollout) else ""

    # ── what an environment calls ──

    async def chat(
        self, *says: Says, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply:
        new = messages_of(says[0]) if len(says) == 1 else [m for said in says for m in messages_of(said)]
        if not self._enter():
            await self._refuse()
        try:
            plan = self._conversation.plan(new, tools)
            if plan.ids is None:
                await self._encode(plan)
            return await self._run(plan, max_tokens)
        finally:
            self._leave()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tell: Tell | None = None,
    ) -> Reply:
        """`tell` is told what is sampled while it is, where the engine can; of others, when a request of the turn ends."""
        if not self._enter():
            await self._refuse()
        try:
            plan = self._conversation.plan_whole(messages, tools)
            if plan.ids is None:
                await self._encode(plan)
            return await self._run(plan, max_tokens, stop=stop, tell=tell)
        finally:
            self._leave()

    async def generate(
        self,
        token_ids: Sequence[int] | Ids,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tell: Tell | None = None,
    ) -> Reply:
        if not self._enter():
            await self._refuse()
        try:
            whole = np.array(token_ids, np.int32)
            whole.flags.writeable = False
            if whole.ndim != 1 or not len(whole):
                raise EnvError(
                    f"generate() was given ids of shape {whole.shape}; expected a list of at least one"
                )
            self._conversation = Conversation(self._bridge)
            return await self._run(None, max_tokens, whole, stop, tell)
        finally:
            self._leave()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Endpoint]:
        """See `Model.serve`."""
        if self._gateway is None:
            raise EnvError(
                "this rollout cannot serve a program: there is no gateway here (in virtual time no socket can be "
                "waited for); run it with `paceline run`, or give the runner a Gateway"
            )
        if self.serves:
            raise EnvError("a program is being served already: a rollout has one endpoint at a time")
        async with self._gateway.session(self._name, self) as endpoint:
            self.serves = True
            try:
                yield endpoint
            finally:
                self.serves = self._hung_up = False

    async def hang_up(self) -> None:
        """End the call under way with the tokens it has: whoever asked for it is not served any more."""
        self._hung_up = True
        if self.engine is not None:
            with contextlib.suppress(EngineError):  # it is then cancelled, a while later
                await self.engine.abort(self.request_id)

    def stop_strings(self, asked: Sequence[str]) -> tuple[str, ...]:
        """All that end the answer to a call that asks for these: the run's come first."""
        return (*self._sampling.stop, *asked)

    def answer_as(self, message: ChatMessage) -> None:
        """Put the latest answer into history in another form: parsed into tool calls, say. The ids stand."""
        self._conversation.answer_as(message)

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._bridge.tokenizer

    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, for the record."""
        return tuple([Message(str(m.get("role")), words_of(m)) for m in self._conversation.messages])

    # ── a turn ──

    async def _encode(self, plan: Plan) -> None:
        if len(plan.text) < LONG_TEXT:
            self._bridge.encode(plan)
            return
        loop = asyncio.get_running_loop()
        self._bridge.settle(plan, *await loop.run_in_executor(None, self._bridge.tokenize, plan))

    async def _run(
        self,
        plan: Plan | None,
        max_tokens: int | None,
        whole: Ids = NO_IDS,
        stop: Sequence[str] = (),
        tell: Tell | None = None,
    ) -> Reply:
        """Sample one turn for an encoded plan, or else for the prompt `whole`; record it, and return it."""
        if plan is None or plan.ids is None:
            self.recorder.prompt(whole)
        elif plan.base is not None:
            self.recorder.extend(plan.ids, plan.base.turn, plan.roles)
        else:
            self.recorder.prompt(plan.ids, plan.roles)
        stops = self.stop_strings(stop)
        chain = Chain(mix(self._noise_seed, len(self.recorder.turns)), stops, tell)
        try:
            allowed, cut = self._allowance(max_tokens, self.recorder.context_tokens)
            chain.asked = self._asked(allowed, stops)
            while True:
                try:
                    finish = await self._segment(chain, allowed)
                except EngineUnavailable as error:
                    await self._before_next(chain, error)
                    continue
                if finish != "abort" or self.stop is not None or self.limit is not None or self._hung_up:
                    break
        except BaseException:
            if self.recorder.call_tokens:
                self._record(plan, chain, "abort")
            else:
                self.recorder.roll_back()
            raise
        if finish == "abort" and not self.recorder.call_tokens:
            self.recorder.roll_back()
        else:
            self.cut = cut if finish == "length" else None
            self._record(plan, chain, finish)
        if self.stop is not None:
            raise asyncio.CancelledError
        if self.limit is not None:
            raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}")
        assert self.last is not None
        return self.last

    async def _before_next(self, chain: Chain, error: EngineUnavailable) -> None:
        """Its engine could not carry out a request: the chain goes on from the tokens it has, wherever the gate says.

        ModelCallFailed when that has gone on for too long, or the rollout is being stopped anyway.
        """
        wait_s = (
            chain.patience.after(error, self._clock()) if self.stop is None and self.limit is None else None
        )
        if wait_s is None:
            self.engine_error = str(error)
            raise ModelCallFailed(self.engine_error) from error
        if wait_s:
            await self._sit_out(chain, wait_s)

    async def _segment(self, chain: Chain, allowed: int) -> Finish:
        """One engine request. Returns how it ended; `abort` also where the chain has to go on for another reason."""
        recorder = self.recorder
        if self._keeping.left is not None and (recorded := await self._recorded(chain)):
            return recorded.finish
        before = recorder.call_tokens
        left = allowed - before
        stop = chain.stop
        # A stop string that began before the boundary is unknown to the engine: it sees this request's tokens only.
        # So the chain goes on token by token until the string is complete or ruled out.
        in_stop = bool(stop) and chain.segments > 0 and may_be_in(self._tail(stop), stop)
        asked = self._clock()
        answer = self._gate.request(TurnRequested(self._rollout, recorder.context_tokens, left))
        if not isinstance(answer, GrantTurn):
            if not answer.done():
                await self._wait(answer)
            answer = answer.result()
        grant = self._accepted(answer)
        if self._parked:
            self._parked = False
            self._return(grant)
            return "abort"
        sent = self._clock()
        self.gate_s += sent - asked
        chain.queued_s += sent - asked
        chain.engine = grant.engine
        chain.ended = 0.0
        if not chain.segments:
            chain.started = sent
        seed = chain.seed
        if chain.segments and not self._noise_by_position:
            seed = mix(
                seed, recorder.call_tokens
            )  # such an engine would repeat the noise of the turn's beginning
        sampling = self._sampling
        most = 1 if in_stop else left if grant.max_tokens is None else min(left, grant.max_tokens)
        request = GenerateRequest(
            f"{self._name}.t{len(recorder.turns)}.s{chain.segments}{self._mark}",
            recorder.context,
            SamplingParams(
                most,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                stop,
                self._stop_ids,
                seed >> 1,  # engines take the seed as a signed 64-bit number
            ),
            self._session,
            f"v{grant.version}",
            None if chain.tell is None else chain.hear,
        )
        chain.segments += 1
        chain.heard = 0
        model_s = self.model_s
        reply = await self._generate(grant, request)
        recorder.segment(reply.token_ids, reply.logprobs, reply.versions, reply.cached_tokens)
        chain.hear_whole(reply.token_ids)
        finish = reply.finish
        if finish == "length":
            if in_stop and any(string in self._tail(stop) for string in stop):
                finish = "stop"
            elif most < left:
                finish = "abort"
        chain.patience.served()
        if len(reply.token_ids):
            chain.empty = 0
            self._keeping.add(
                chain,
                recorder,
                reply,
                finish=finish,
                before=before,
                queued_s=sent - asked,
                started=sent,
                ended=self._clock(),
                model_s=self.model_s - model_s,
            )
        elif finish == "abort":
            chain.empty += 1
            if chain.empty == EMPTY_ABORTS:
                self.engine_error = (
                    f"engine {grant.engine} aborted {EMPTY_ABORTS} requests in a row without a token"
                )
                raise ModelCallFailed(self.engine_error)
        return finish

    # ── parts ──

    def _asked(self, allowed: int, stops: tuple[str, ...]) -> Asked:
        sampling = self._sampling
        return Asked(allowed, sampling.temperature, sampling.top_p, sampling.top_k, stops)

    async def _recorded(self, chain: Chain) -> Part | None:
        """One request answered from the record; None where that ends."""
        await asyncio.sleep(0)  # a long record must not hold up the loop
        part = self._keeping.next(self.recorder, chain.asked)
        if part is None:
            return None
        self.recorder.segment(part.sampled_ids, part.logprobs, part.versions, part.cached_tokens)
        chain.hear_whole(part.sampled_ids)
        if not chain.segments:
            chain.started = part.started
        chain.segments += 1
        chain.engine = part.engine
        chain.queued_s += part.queued_s
        chain.ended = part.ended
        self.gate_s += part.queued_s
        self.model_s += part.model_s
        return part

    def end_record(self) -> None:
        self._keeping.end(self.recorder)

    def _record(self, plan: Plan | None, chain: Chain, finish: Finish) -> None:
        turn = self.recorder.commit(
            finish,
            engine=chain.engine,
            queued_s=chain.queued_s,
            started=chain.started,
            ended=chain.ended or self._clock(),
            segments=chain.segments,
        )
        ids = turn.sampled_ids
        last = int(ids[-1]) if len(ids) else None
        end = last if last in self._stop_ids else None
        text = shown = self._bridge.tokenizer.decode(ids if end is None else ids[:-1])
        if end is None and finish == "stop" and chain.stop:
            shown = text[: first_mark(text, chain.stop)]
        self.last = Reply(shown, finish, ids, turn.logprobs)
        if plan is not None:
            node = self._conversation.commit(plan, ids, end, text, shown)
            node.turn = len(self.recorder.turns) - 1

    def _tail(self, stop: tuple[str, ...]) -> str:
        """The end of what the running call has sampled, long enough for any of the strings `stop`."""
        longest = max(map(len, stop))
        tokens = min(
            self.recorder.call_tokens, 4 * longest + 8
        )  # a character is at most four tokens, of a byte each
        context = self.recorder.context
        return self._bridge.tokenizer.decode(context[len(context) - tokens :], keep_special=True)


def _max_context(limits: Limits, engine: Engine | None) -> int | None:
    said = [limits.max_context, engine.info.max_model_len if engine is not None else None]
    return min((n for n in said if n is not None), default=None)
