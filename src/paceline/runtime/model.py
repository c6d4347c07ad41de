"""The policy as one rollout sees it: chat in, exact ids recorded.

A model call is a chain of engine requests, each of which extends exactly the ids so far. Each asks the turn gate, and
each is reported when it ends. An engine that stops a request of its own accord (to load weights, or to park the rollout)
hands back what it sampled, and the chain goes on from there. A rollout of an earlier life is answered from its record
first (`continuing`).

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
from paceline.core.samples import HIGHEST_LOGPROB, LOWEST_LOGPROB
from paceline.core.streams import mix
from paceline.domain.commands import ContinueRollout, GrantTurn, StartRollout
from paceline.domain.events import RolloutContinued, SegmentEnded, TurnRequested
from paceline.domain.ids import EngineId
from paceline.domain.part import Asked, Part, sampled_crc
from paceline.domain.rollout import Finish, Message
from paceline.envs.endpoint import Endpoint
from paceline.envs.protocol import (
    ChatMessage,
    Reply,
    RolloutTruncated,
    Says,
    messages_of,
)
from paceline.envs.recorder import NO_IDS, Recorder
from paceline.errors import (
    EngineBusy,
    EngineError,
    EngineUnavailable,
    EnvError,
    ImpossibleLogprobs,
    InvariantError,
    ModelCallFailed,
)
from paceline.ports import Engine, GenerateReply, GenerateRequest, SamplingParams
from paceline.runtime.calls import Calls, EnvRuntime
from paceline.runtime.continuing import Record
from paceline.runtime.gate import TurnGate
from paceline.runtime.gateway.server import Gateway
from paceline.runtime.impossible import ImpossibleWatch
from paceline.runtime.patience import Patience
from paceline.tokens import ChatTokenizer, Conversation, Plan
from paceline.tokens.marks import first_mark, sure_of
from paceline.tokens.messages import words_of

LONG_TEXT: Final = 20_000
"""Characters from which encoding leaves the loop: about 5 ms of work, against 22 µs for the hop."""

EMPTY_ABORTS: Final = 32
"""Engine requests in a row that may be aborted without a token before the engine counts as failed: a chain that
never gets anywhere must end."""

_NOTHING_ASKED: Final = Asked(0)

Ids: TypeAlias = NDArray[np.int32]
Tell: TypeAlias = Callable[[Sequence[int]], None]
Launch: TypeAlias = StartRollout | ContinueRollout
"""What a rollout is begun with."""


class ModelCalls(Calls):
    """The `Model` of one rollout: conversation, recorder and budgets."""

    __slots__ = (
        "_bridge",
        "_clock",
        "_conversation",
        "_engines",
        "_gate",
        "_gateway",
        "_hung_up",
        "_impossible",
        "_keep",
        "_mark",
        "_name",
        "_noise_by_position",
        "_noise_seed",
        "_on_record_end",
        "_parked",
        "_record_left",
        "_requests",
        "_rollout",
        "_sampled_crc",
        "_session",
        "_stop_ids",
    )

    recorder: Recorder

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
        """`parts`: what earlier lives have left of the rollout; `on_record_end` is told when it has come to the end of
        that, and how its environment strayed from it, if it did. `keep` is given what is sampled in this life."""
        self._rollout = command.rollout
        self._name = str(command.rollout)
        self._session = f"g{command.rollout.group}"
        self._noise_seed = command.noise_seed
        super().__init__(shared, Recorder(), _max_context(shared.limits, engines.get(command.engine)))
        bridge = shared.bridge
        if bridge is None:
            raise InvariantError(
                f"rollout {command.rollout} is to be sampled on an engine, and has no tokenizer"
            )
        self._bridge = bridge
        self._stop_ids = bridge.tokenizer.stop_ids
        self._engines = engines
        self._gate = gate
        self._clock = clock
        self._noise_by_position = noise_by_position
        self._impossible = impossible
        self._conversation = Conversation(bridge)
        self._gateway = gateway
        self._hung_up = False
        self._keep = keep
        self._on_record_end = on_record_end
        self._requests = 0
        """Engine requests that sampled something, those of earlier lives included."""
        self._sampled_crc = 0
        """Of what it has sampled so far, its record included, where parts are kept."""
        self._record_left: Record | None = None
        """What of its record the rollout has still before it."""
        self._mark = ""
        if isinstance(command, ContinueRollout):
            self._requests = command.requests
            self._record_left = Record(command, parts)
            # An engine may still be busy with the request that the earlier life had under way.
            self._mark = f"-{round(1000 * clock()):x}"
        self._parked = False
        """Set when it is parked in the moment between a grant and the request: the request is not sent."""

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
        call = _Call(mix(self._noise_seed, len(self.recorder.turns)), stops, tell)
        try:
            allowed, cut = self._allowance(max_tokens, self.recorder.context_tokens)
            call.asked = self._asked(allowed, stops)
            while True:
                try:
                    finish = await self._segment(call, allowed)
                except EngineUnavailable as error:
                    await self._before_next(call, error)
                    continue
                if finish != "abort" or self.stop is not None or self.limit is not None or self._hung_up:
                    break
        except BaseException:
            if self.recorder.call_tokens:
                self._record(plan, call, "abort")
            else:
                self.recorder.roll_back()
            raise
        if finish == "abort" and not self.recorder.call_tokens:
            self.recorder.roll_back()
        else:
            self.cut = cut if finish == "length" else None
            self._record(plan, call, finish)
        if self.stop is not None:
            raise asyncio.CancelledError
        if self.limit is not None:
            raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}")
        assert self.last is not None
        return self.last

    async def _before_next(self, call: _Call, error: EngineUnavailable) -> None:
        """Its engine could not carry out a request: the chain goes on from the tokens it has, wherever the gate says.

        ModelCallFailed when that has gone on for too long, or the rollout is being stopped anyway.
        """
        wait_s = (
            call.patience.after(error, self._clock()) if self.stop is None and self.limit is None else None
        )
        if wait_s is None:
            self.engine_error = str(error)
            raise ModelCallFailed(self.engine_error) from error
        if wait_s:
            await self._sit_out(call, wait_s)

    async def _sit_out(self, call: _Call, seconds: float) -> None:
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
            call.queued_s += self._clock() - began

    async def _segment(self, call: _Call, allowed: int) -> Finish:
        """One engine request. Returns how it ended; `abort` also where the chain has to go on for another reason."""
        recorder = self.recorder
        if self._record_left is not None and (recorded := await self._recorded(self._record_left, call)):
            return recorded.finish
        before = recorder.call_tokens
        left = allowed - before
        stop = call.stop
        # A stop string that began before the boundary is unknown to the engine: it sees this request's tokens only.
        # So the chain goes on token by token until the string is complete or ruled out.
        in_stop = bool(stop) and call.segments > 0 and _may_be_in_stop(self._tail(stop), stop)
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
        call.queued_s += sent - asked
        call.engine = grant.engine
        call.ended = 0.0
        if not call.segments:
            call.started = sent
        seed = call.seed
        if call.segments and not self._noise_by_position:
            seed = mix(
                seed, recorder.call_tokens
            )  # such an engine would repeat the noise of the turn's beginning
        sampling = self._sampling
        most = 1 if in_stop else left if grant.max_tokens is None else min(left, grant.max_tokens)
        request = GenerateRequest(
            f"{self._name}.t{len(recorder.turns)}.s{call.segments}{self._mark}",
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
            None if call.tell is None else call.hear,
        )
        call.segments += 1
        call.heard = 0
        model_s = self.model_s
        reply = await self._generate(grant, request)
        recorder.segment(reply.token_ids, reply.logprobs, reply.versions, reply.cached_tokens)
        call.hear_whole(reply.token_ids)
        finish = reply.finish
        if finish == "length":
            if in_stop and any(string in self._tail(stop) for string in stop):
                finish = "stop"
            elif most < left:
                finish = "abort"
        call.patience.served()
        if len(reply.token_ids):
            call.empty = 0
            if self._keep is not None:
                self._keep(
                    self._part(call, reply, finish, before, sent - asked, sent, self.model_s - model_s)
                )
                self._sampled_crc = sampled_crc(reply.token_ids, self._sampled_crc)
            self._requests += 1
        elif finish == "abort":
            call.empty += 1
            if call.empty == EMPTY_ABORTS:
                self.engine_error = (
                    f"engine {grant.engine} aborted {EMPTY_ABORTS} requests in a row without a token"
                )
                raise ModelCallFailed(self.engine_error)
        return finish

    # ── parts ──

    def _asked(self, allowed: int, stops: tuple[str, ...]) -> Asked:
        sampling = self._sampling
        return Asked(allowed, sampling.temperature, sampling.top_p, sampling.top_k, stops)

    def _part(
        self,
        call: _Call,
        reply: GenerateReply,
        finish: Finish,
        before: int,
        queued_s: float,
        started: float,
        model_s: float,
    ) -> Part:
        recorder = self.recorder
        return Part(
            self._rollout,
            self._requests,
            len(recorder.turns),
            before,
            recorder.goes_on_from,
            NO_IDS if before else recorder.prompt_ids,
            reply.token_ids,
            reply.logprobs,
            reply.versions,
            finish,
            call.asked,
            call.engine,
            reply.cached_tokens,
            queued_s,
            started,
            self._clock(),
            model_s,
            self._sampled_crc,
        )

    async def _recorded(self, record: Record, call: _Call) -> Part | None:
        """The next request, as an earlier life has recorded it; None where the record ends."""
        await asyncio.sleep(0)  # a long record must not hold up the loop
        recorder = self.recorder
        part = record.next(
            len(recorder.turns),
            recorder.call_tokens,
            recorder.goes_on_from,
            recorder.prompt_ids,
            call.asked,
        )
        if part is None:
            self.end_record()
            return None
        recorder.segment(part.sampled_ids, part.logprobs, part.versions, part.cached_tokens)
        self._sampled_crc = sampled_crc(part.sampled_ids, self._sampled_crc)
        call.hear_whole(part.sampled_ids)
        if not call.segments:
            call.started = part.started
        call.segments += 1
        call.engine = part.engine
        call.queued_s += part.queued_s
        call.ended = part.ended
        self.gate_s += part.queued_s
        self.model_s += part.model_s
        return part

    def end_record(self) -> None:
        """The rollout goes on, or ends, from here: tell it, if it has a record before it."""
        record, self._record_left = self._record_left, None
        if record is not None:
            is_mid_turn = self.recorder.call_tokens > 0
            turns = len(self.recorder.turns) + is_mid_turn
            self._on_record_end(record.end(is_mid_turn=is_mid_turn, turns=turns), record.strayed)

    def _record(self, plan: Plan | None, call: _Call, finish: Finish) -> None:
        turn = self.recorder.commit(
            finish,
            engine=call.engine,
            queued_s=call.queued_s,
            started=call.started,
            ended=call.ended or self._clock(),
            segments=call.segments,
        )
        ids = turn.sampled_ids
        last = int(ids[-1]) if len(ids) else None
        end = last if last in self._stop_ids else None
        text = shown = self._bridge.tokenizer.decode(ids if end is None else ids[:-1])
        if end is None and finish == "stop" and call.stop:
            shown = text[: first_mark(text, call.stop)]
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

    # ── the gate and the engine ──

    def park(self) -> None:
        """The core wants its engine's place back. What has not been granted yet is held at the gate anyway."""
        if self.pending is not None and self.pending.done():
            self._parked = True

    async def _wait(self, future: asyncio.Future[GrantTurn]) -> None:
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

    async def _generate(self, grant: GrantTurn, request: GenerateRequest) -> GenerateReply:
        began = self._clock()
        engine = self._engines.get(grant.engine)
        try:
            if engine is None:
                raise EngineError(f"engine {grant.engine!r} is gone")
            self.where, self.engine, self.request_id = "engine", engine, request.request_id
            reply = check_reply(await engine.generate(request), request.sampling.max_tokens)
        except BaseException as error:
            self.where, self.engine = (
                "env",
                None,
            )  # before the report: what it brings about finds no call here
            took = self._clock() - began
            self.model_s += took
            cancelled = not isinstance(error, Exception)
            if cancelled and self.stop is None and self.limit is None:
                # An environment's own time limit. Three of them in a row must not look like an engine that fails.
                self._gate.report(
                    SegmentEnded(self._rollout, grant.engine, (), "abort", 0, took, given_up=True)
                )
                raise
            text = "cancelled while it ran" if cancelled else _told(error, grant.engine)
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


class _Call:
    """What adds up over the segments of one turn."""

    __slots__ = (
        "asked",
        "empty",
        "ended",
        "engine",
        "heard",
        "patience",
        "queued_s",
        "seed",
        "segments",
        "started",
        "stop",
        "tell",
    )

    def __init__(self, seed: int, stop: tuple[str, ...], tell: Tell | None) -> None:
        self.tell = tell
        self.heard = 0
        """Tokens of the request under way that have been told."""
        self.seed = seed
        self.stop = stop
        """Strings that end it."""
        self.asked = _NOTHING_ASKED
        self.engine: EngineId = ""
        self.queued_s = 0.0
        self.started = 0.0
        self.ended = 0.0
        """When its latest request ended, if that is from a record; 0 if it is not."""
        self.segments = 0
        self.empty = 0
        self.patience = Patience()

    def hear(self, ids: Sequence[int]) -> None:
        """The engine of the request under way tells what it samples."""
        assert self.tell is not None
        self.heard += len(ids)
        self.tell(ids)

    def hear_whole(self, ids: Ids) -> None:
        """The request has ended with these."""
        if self.tell is not None and len(ids) > self.heard:
            self.tell(ids[self.heard :].tolist())


def check_reply(reply: GenerateReply, max_tokens: int) -> GenerateReply:
    """The reply, if its tokens can be trained on. EngineError names the position and the value otherwise."""
    ids, logprobs = reply.token_ids, reply.logprobs
    count = len(ids)
    if count != len(logprobs):
        raise EngineError(
            f"the engine returned {count} token ids and {len(logprobs)} logprobs; both are needed for each sampled "
            "token (vLLM: return_token_ids and logprobs=0 or more)"
        )
    if count > max_tokens:
        raise EngineError(f"the engine returned {count} tokens where at most {max_tokens} were asked for")
    runs = reply.versions
    if (runs[0][1] if len(runs) == 1 else sum([n for _, n in runs])) != count:
        raise EngineError(f"the engine's versions {reply.versions} do not add up to its {count} tokens")
    if not count:
        return reply
    kinds = ids.dtype, logprobs.dtype
    if (kinds[0] is not _INT32 or kinds[1] is not _FLOAT32) and kinds != (_INT32, _FLOAT32):
        raise EngineError(f"the engine client returned {ids.dtype} ids and {logprobs.dtype} logprobs")
    # Written so that NaN fails: it makes both comparisons false.
    if not (_least(logprobs) > LOWEST_LOGPROB and _greatest(logprobs) <= HIGHEST_LOGPROB):
        bad = np.flatnonzero(~((logprobs > LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)))
        at = int(bad[0])
        raise ImpossibleLogprobs(
            f"the engine returned {float(logprobs[at])} as the logprob of sampled token {at} (id {int(ids[at])}); "
            "a sampled token has a finite logprob of at most 0",
            bad=len(bad),
            tokens=count,
        )
    return reply


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_least, _greatest = np.minimum.reduce, np.maximum.reduce


def _max_context(limits: Limits, engine: Engine | None) -> int | None:
    said = [limits.max_context, engine.info.max_model_len if engine is not None else None]
    return min((n for n in said if n is not None), default=None)


def _told(error: BaseException, engine: EngineId) -> str:
    text = str(error)
    if not isinstance(error, EngineError):
        text = f"{type(error).__name__}: {text}"
    return text if engine in text else f"engine {engine}: {text}"


def _may_be_in_stop(tail: str, stop: tuple[str, ...]) -> bool:
    """Whether `tail` ends with the beginning of a stop string, or with half a character."""
    if tail.endswith("\ufffd"):
        return True
    return sure_of(tail, stop) < len(tail)
