"""What people are told of a run while it goes on, in lines: the panel of a terminal and plain lines show the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.domain.commands import Command, ReviveEngine, WakeAt
from paceline.domain.events import (
    CheckpointSaved,
    EngineJoined,
    EngineLost,
    Event,
    RolloutEnded,
    RunOpened,
    ShutdownRequested,
    WeightsLoaded,
)
from paceline.domain.rollout import Rollout
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds

LINE, WHOLE = 160, 1000
"""Characters shown of a line, and of a warning that has to be read to its end."""


class News:
    """What people want to know of among thousands of events. A storm of failures is told now and then."""

    def __init__(self, failure_s: float = 5.0) -> None:
        self._failure_s = failure_s
        self._next_failure = 0.0
        self._untold = 0

    def of(self, at: float, event: Event, commands: Sequence[Command]) -> list[str]:
        """Lines about `event`, and what was decided upon it."""
        told = self._of_event(at, event)
        return [*([] if told is None else [told]), *_of_engines(event, commands)]

    def _of_event(self, at: float, event: Event) -> str | None:
        match event:
            case RolloutEnded():
                return self._failed(at, event.rollout) if event.rollout.outcome.ending == "failed" else None
            case RunOpened():
                again = "" if event.resumed_from is None else f", resumed from step {event.resumed_from}"
                return f"run {event.run_id} opened, seed {event.seed}{again}"
            case EngineJoined():
                return f"engine {event.info.id} joined with v{event.version}"
            case EngineLost():
                return f"engine {event.engine} {'leaves' if event.leaves else 'lost'}: {event.error}"
            case WeightsLoaded() if event.error is not None:
                return f"engine {event.engine} did not load v{event.version}: {event.error}"
            case CheckpointSaved():
                return f"checkpoint of step {event.step} saved in {event.seconds:.1f} s"
            case ShutdownRequested():
                return f"shutting down: {event.why}"
            case _:
                return None

    def _failed(self, at: float, rollout: Rollout) -> str | None:
        if at < self._next_failure:
            self._untold += 1
            return None
        self._next_failure = at + self._failure_s
        more = f" (and {self._untold} before it)" if self._untold else ""
        self._untold = 0
        outcome = rollout.outcome
        return f"{rollout.task.env} {rollout.id} failed ({outcome.cause}){more}: {outcome.detail}"


def _of_engines(event: Event, commands: Sequence[Command]) -> list[str]:
    """What is told of engines that are taken out of use, by whatever event, and of how long the run waits when none is left."""
    out = [command for command in commands if type(command) is ReviveEngine]
    lines = []
    if not isinstance(event, EngineLost | WeightsLoaded):  # which are told with their errors
        lines += [
            f"engine {command.engine} is taken out until it answers again: {command.reason}"
            for command in out
        ]
    if out or isinstance(event, EngineLost):
        lines += [command.reason for command in commands if type(command) is WakeAt]
    return lines


def row_text(row: Row, max_steps: int) -> str:
    """A row in one line."""
    get = row.values.get
    if row.kind == "eval":
        prefix = f"eval/{row.env}"
        passes = [
            f"  {name[len(prefix) + 1 :]} {value:.3f}"
            for name, value in row.values.items()
            if name.startswith(f"{prefix}/pass@")
        ]
        reward = number(get(f"{prefix}/reward"), 3)
        count = int(get(f"{prefix}/rollouts", 0))
        return f"{eval_title(row.env)} at v{row.step}: reward {reward}{''.join(passes)}  ({count} rollouts)"
    if row.trained and all(name.startswith("trainer/") for name in row.values):
        return f"step {row.step}/{max_steps} trained, from the batch that an earlier life shipped"
    share = get("goodput")
    return (
        f"step {row.step}/{max_steps}"
        f"{'' if row.trained else ' shipped, not trained'}"
        f"  reward {number(get('train/all/reward'), 3)}{_by_env(row)}"
        f"  length {number(get('train/all/length'))}"
        f"  staleness {number(get('staleness/mean'))}/{number(get('staleness/max'))}"
        f"  tokens/s {number(get('throughput/sampled'))}"
        f"  goodput {'–' if share is None else f'{share:.0%}'}"
        f"  step time {number(get('time/step_s'))} s"
    )


def _by_env(row: Row) -> str:
    """The rewards of a mixed run, one an environment."""
    ends = "/drawn_share"
    envs = [name[len("train/") : -len(ends)] for name in row.values if name.endswith(ends)]
    rewards = [f"{env} {number(row.values.get(f'train/{env}/reward'), 3)}" for env in envs]
    return f" ({', '.join(rewards)})" if len(rewards) > 1 else ""


def eval_title(env: str) -> str:
    """What an eval is called, which may say so itself."""
    return env if "heldout" in env.replace("-", "") else f"held-out {env}"


def number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def seconds_text(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def one_line(text: str, longest: int = LINE) -> str:
    """Printable and short: errors quote foreign text, and no control character of it may reach a terminal."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    return clean if len(clean) <= longest else f"{clean[:longest]}…"


class Elapsed:
    """Seconds that a view shows: from its own start on, and not from the run's opening, so that the start-up counts
    and the clock never goes back; those of a resumed run's earlier lives are before that."""

    def __init__(self, folds: RunFolds, clock: Callable[[], float]) -> None:
        self._folds, self._clock = folds, clock
        self._from = clock() - folds.elapsed
        self._shift = 0.0
        """Between the run's clock since its opening, and this one."""
        self._stopped: float | None = None

    def now(self) -> float:
        return self._clock() - self._from if self._stopped is None else self._stopped

    def at(self, at: float) -> float:
        """A moment of the run's clock."""
        return at - (self._folds.run.opened_at or 0.0) + self._shift

    def opened(self, at: float) -> None:
        self._stopped, self._shift = None, 0.0
        self._shift = self.now() - self.at(at)

    def stop(self) -> None:
        self._stopped = self.now()
