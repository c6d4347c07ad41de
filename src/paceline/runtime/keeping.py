"""What one rollout leaves on record while it runs, for a later life, and takes from the record of an earlier one.

    engine request ─▶ `add`: a part, to whoever keeps them          earlier life's parts ─▶ `next` ─▶ instead of a request

See `docs/continuing.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.domain.commands import ContinueRollout, StartRollout
from paceline.domain.events import RolloutContinued
from paceline.domain.part import Asked, Part, sampled_crc
from paceline.domain.rollout import Finish
from paceline.envs.recorder import NO_IDS, Recorder
from paceline.ports import GenerateReply
from paceline.runtime.chain import Chain
from paceline.runtime.continuing import Record


class Keeping:
    """The record of one rollout, behind it and before it."""

    __slots__ = ("_keep", "_on_end", "_requests", "_rollout", "_sampled_crc", "left")

    def __init__(
        self,
        command: StartRollout | ContinueRollout,
        parts: Sequence[Part],
        keep: Callable[[Part], None] | None,
        on_end: Callable[[RolloutContinued, str], None],
    ) -> None:
        """`parts`: what earlier lives have left of the rollout; `on_end` is told when it has come to the end of that, and how
        its environment strayed from it, if it did. `keep` is given what is sampled in this life."""
        self._rollout = command.rollout
        self._keep = keep
        self._on_end = on_end
        self._requests = 0
        """Engine requests that sampled something, those of earlier lives included."""
        self._sampled_crc = 0
        """Of what it has sampled so far, its record included, where parts are kept."""
        self.left: Record | None = None
        """What of its record the rollout has still before it; None when that is nothing."""
        if isinstance(command, ContinueRollout):
            self._requests = command.requests
            self.left = Record(command, parts)

    def add(
        self,
        chain: Chain,
        recorder: Recorder,
        reply: GenerateReply,
        *,
        finish: Finish,
        before: int,
        queued_s: float,
        started: float,
        ended: float,
        model_s: float,
    ) -> None:
        """A request has sampled something, behind `before` tokens of its turn."""
        if self._keep is not None:
            self._keep(
                Part(
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
                    chain.asked,
                    chain.engine,
                    reply.cached_tokens,
                    queued_s,
                    started,
                    ended,
                    model_s,
                    self._sampled_crc,
                )
            )
            self._sampled_crc = sampled_crc(reply.token_ids, self._sampled_crc)
        self._requests += 1

    def next(self, recorder: Recorder, asked: Asked) -> Part | None:
        """The next request, as an earlier life has recorded it; None where the record ends."""
        if self.left is None:
            return None
        part = self.left.next(
            len(recorder.turns), recorder.call_tokens, recorder.goes_on_from, recorder.prompt_ids, asked
        )
        if part is None:
            self.end(recorder)
        else:
            self._sampled_crc = sampled_crc(part.sampled_ids, self._sampled_crc)
        return part

    def end(self, recorder: Recorder) -> None:
        """The rollout goes on, or ends, from here: tell it, if it has a record before it."""
        record, self.left = self.left, None
        if record is not None:
            is_mid_turn = recorder.call_tokens > 0
            turns = len(recorder.turns) + is_mid_turn
            self._on_end(record.end(is_mid_turn=is_mid_turn, turns=turns), record.strayed)
