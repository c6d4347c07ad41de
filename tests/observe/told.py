"""Folds that are told a story by hand, for cases with exact numbers."""

from __future__ import annotations

from collections.abc import Sequence

from observe.worlds import sample, turn
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.group import Fate, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Outcome, Rollout
from paceline.domain.sample import Sample
from paceline.domain.task import Split, TaskRef
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds

FAILED = Outcome("failed", "environment", "it broke")


class Told:
    """Speaks to folds in whole sentences; every call is one decision, a second after the one before."""

    def __init__(self, **options: bool) -> None:
        self.folds = RunFolds(**options)
        self.rows: list[Row] = []
        self.folds.training.listen(self.rows.append)
        self.now = 0.0
        self.rollouts: dict[RolloutId, Rollout] = {}
        self.tell(on.RunOpened("told", 7))

    def tell(self, event: on.Event, *commands: do.Command) -> None:
        self.folds.apply(self.now, event, commands)
        self.now += 1.0

    def start(
        self, group: int, members: int = 1, env: str = "a", split: Split = "train", attempt: int = 0
    ) -> list[RolloutId]:
        ids = [RolloutId(group, member, attempt) for member in range(members)]
        task = TaskRef(env, split, group)
        for rollout in ids:
            self.rollouts[rollout] = Rollout(id=rollout, task=task, outcome=COMPLETED)
        self.tell(on.TimerFired(), *(do.StartRollout(r, task, 0, r.member, "e0", 0) for r in ids))
        return ids

    def call(
        self, rollout: RolloutId, tokens: int, *, context: int = 10, cached: int = 0, version: int = 0
    ) -> None:
        self.tell(on.TurnRequested(rollout, context, 100), do.GrantTurn(rollout, "e0", version))
        runs = ((version, tokens),) if tokens else ()
        self.tell(on.SegmentEnded(rollout, "e0", runs, "stop", cached, 1.0))

    def end(
        self,
        rollout: RolloutId,
        tokens: int = 10,
        *,
        reward: float | None = 1.0,
        outcome: Outcome = COMPLETED,
        rewards: dict[str, float] | None = None,
        version: int = 0,
    ) -> None:
        before = self.rollouts[rollout]
        ended = Rollout(
            id=rollout,
            task=before.task,
            outcome=outcome,
            turns=(turn(tokens, version=version),) if tokens else (),
            reward=reward,
            rewards=rewards or {},
            started=self.now - 4.0,
            ended=self.now,
            model_s=2.5,
            gate_s=0.5,
        )
        self.rollouts[rollout] = ended
        self.tell(on.RolloutEnded(ended))

    def verdict(
        self, rollout: RolloutId, fate: Fate = "queued", *, advantage: float | None = 1.0, cut: int = 0,
        flags: tuple[str, ...] = (),
    ) -> Verdict:  # fmt: skip
        samples = (sample(self.rollouts[rollout], cut=cut),) if fate == "queued" else ()
        return Verdict(rollout, fate, samples=samples, advantage=advantage, flags=flags)

    def process(
        self, verdicts: Sequence[Verdict], *, variance: float | None = 0.25, dead: str | None = None
    ) -> None:
        group = verdicts[0].rollout.group
        result = GroupResult(group, tuple(verdicts), 0.5, variance, dead)
        self.tell(on.GroupProcessed(result), do.ForgetGroup(group))

    def ship(self, step: int, rollouts: Sequence[RolloutId], samples: Sequence[Sample] | None = None) -> Row:
        """Cut, ship and train a batch; returns its row."""
        made = tuple(samples) if samples is not None else tuple(sample(self.rollouts[r]) for r in rollouts)
        self.tell(on.TimerFired(), do.ShipBatch(Batch(step, made, tuple(rollouts))))
        self.tell(on.BatchShipped(step, 100, 0.1, 0.2))
        self.tell(on.StepTrained(step, {"loss": 0.5}))
        return self.rows[-1]

    def finish(self, status: str = "done") -> None:
        self.tell(on.TimerFired(), do.FinishRun(status, "told"))  # type: ignore[arg-type]
