"""One simulated rollout on its way: its plan, what it has sampled, and the record it leaves."""

from __future__ import annotations

import msgspec

from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.ids import EngineId, Version
from paceline.domain.rollout import CancelCause, Finish, Outcome, Rollout, Turn, VersionRuns
from paceline.sim.engine.calls import Call
from paceline.sim.plan import RolloutPlan, Start
from paceline.sim.records import blank_ids, blank_logprobs


class SimRollout(msgspec.Struct, eq=False, gc=False):
    """Carries out a plan turn by turn; knows nothing of time but what it is told."""

    command: StartRollout
    plan: RolloutPlan
    started: float
    context: int = 0
    """Tokens of its conversation."""
    prompt: int = 0
    """Tokens that are new in the prompt of the turn under way."""
    position: int = 0
    """Turns that are over."""
    start: Start | None = None
    """Where the turn under way began, if not behind the turn before."""
    conversation: int = 0
    """To which it belongs."""
    left: int = 0
    """Tokens that the turn under way has still to sample."""
    turns: list[Turn] = []
    versions: VersionRuns = ()
    """Of what the turn under way has sampled."""
    segments: int = 0
    turn_started: float = 0.0
    turn_cached: int = 0
    queued_s: float = 0.0
    asked: float = 0.0
    sent: float = 0.0
    engine: EngineId = ""
    grant: GrantTurn | None = None
    """A turn that was granted while it waited, until it has heard of that. Parking it takes the grant away."""
    call: Call | None = None
    """The engine request under way."""
    cancelled: CancelCause | None = None
    is_over: bool = False
    has_scorer: bool = False
    """Whether it has one of the places to be scored."""
    model_s: float = 0.0
    gate_s: float = 0.0
    failure: Outcome | None = None
    """How a fault will end it, at turn `failure_at`."""
    failure_at: int = 0

    def __post_init__(self) -> None:
        self.context = self.prompt = self.plan.scaffold + self.plan.prompt

    def begin_turn(self) -> None:
        """The next turn's observation is in."""
        _, observed, sampled = self.plan.turns[self.position]
        if self.position:
            starts = self.plan.starts
            start = self.start = starts[self.position] if starts else None
            self.prompt = observed
            if start is None:
                self.context += observed
            else:
                self.context = start.kept + observed
                self.conversation = start.conversation
                if start.after < 0:
                    self.prompt = self.context
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
            after = self.position - 1 if self.start is None else self.start.after
            self.turns.append(
                Turn(
                    prompt_ids=blank_ids(self.prompt),
                    sampled_ids=blank_ids(tokens),
                    logprobs=blank_logprobs(tokens),
                    versions=self.versions,
                    extends=bool(self.turns) and after >= 0,
                    finish=finish,
                    engine=self.engine,
                    cached_tokens=self.turn_cached,
                    queued_s=self.queued_s,
                    started=self.turn_started,
                    ended=now,
                    segments=self.segments,
                    after=after if after < self.position - 1 else -1,
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
