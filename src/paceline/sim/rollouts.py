"""One simulated rollout on its way: its plan, what it has sampled, and the record it leaves."""

from __future__ import annotations

from paceline.domain.commands import StartRollout
from paceline.domain.ids import EngineId, Version
from paceline.domain.rollout import CancelCause, Finish, Outcome, Rollout, Turn, VersionRuns
from paceline.sim.engine.calls import Call
from paceline.sim.plan import RolloutPlan
from paceline.sim.records import blank_ids, blank_logprobs


class SimRollout:
    """Carries out a plan turn by turn; knows nothing of time but what it is told."""

    __slots__ = (
        "asked",
        "call",
        "cancelled",
        "command",
        "context",
        "engine",
        "failure",
        "failure_at",
        "gate_s",
        "is_over",
        "left",
        "model_s",
        "parked",
        "plan",
        "position",
        "prompt",
        "queued_s",
        "segments",
        "sent",
        "started",
        "turn_cached",
        "turn_started",
        "turns",
        "versions",
    )

    def __init__(self, command: StartRollout, plan: RolloutPlan, now: float) -> None:
        self.command = command
        self.plan = plan
        self.started = now
        self.position = 0
        """Turns that are over."""
        self.context = plan.scaffold + plan.prompt
        """Tokens of its conversation."""
        self.prompt = self.context
        """Tokens that are new in the prompt of the turn under way."""
        self.left = 0
        """Tokens that the turn under way has still to sample."""
        self.turns: list[Turn] = []
        self.versions: VersionRuns = ()
        """Of what the turn under way has sampled."""
        self.segments = 0
        self.turn_started = 0.0
        self.turn_cached = 0
        self.queued_s = 0.0
        self.asked = 0.0
        self.sent = 0.0
        self.engine: EngineId = ""
        self.call: Call | None = None
        """The engine request under way."""
        self.cancelled: CancelCause | None = None
        self.parked = False
        """Whether it was parked between a grant and now."""
        self.is_over = False
        self.model_s = 0.0
        self.gate_s = 0.0
        self.failure: Outcome | None = None
        """How a fault will end it, at turn `failure_at`."""
        self.failure_at = 0

    def begin_turn(self) -> None:
        """The next turn's observation is in."""
        _, observed, sampled = self.plan.turns[self.position]
        if self.position:
            self.prompt = observed
            self.context += observed
        self.left = sampled
        self.versions = ()
        self.segments = 0
        self.queued_s = 0.0

    def segment(self, versions: VersionRuns, tokens: int) -> None:
        """One engine request of the turn has ended with `tokens`."""
        self.left -= tokens
        self.context += tokens
        if not self.versions:
            self.versions = versions
        elif versions:
            self.versions = joined(self.versions, versions)

    def commit(self, finish: Finish, now: float) -> None:
        """The turn under way is over, whether or not it has all it wanted."""
        tokens = sum([count for _, count in self.versions])
        if tokens:
            self.turns.append(
                Turn(
                    prompt_ids=blank_ids(self.prompt),
                    sampled_ids=blank_ids(tokens),
                    logprobs=blank_logprobs(tokens),
                    versions=self.versions,
                    extends=bool(self.turns),
                    finish=finish,
                    engine=self.engine,
                    cached_tokens=self.turn_cached,
                    queued_s=self.queued_s,
                    started=self.turn_started,
                    ended=now,
                    segments=self.segments,
                )
            )
            self.versions = ()
        self.position += 1

    def record(self, outcome: Outcome, now: float) -> Rollout:
        """The terminal record."""
        if self.versions:
            self.commit("abort", now)
        scored = outcome.ending in ("completed", "truncated")
        return Rollout(
            id=self.command.rollout,
            task=self.command.task,
            outcome=outcome,
            turns=tuple(self.turns),
            reward=self.plan.reward if scored else None,
            started=self.started,
            ended=now,
            model_s=self.model_s,
            gate_s=self.gate_s,
        )


def joined(first: VersionRuns, second: VersionRuns) -> VersionRuns:
    """Two run-lengths as one."""
    if first[-1][0] != second[0][0]:
        return first + second
    version: Version = first[-1][0]
    return (*first[:-1], (version, first[-1][1] + second[0][1]), *second[1:])
