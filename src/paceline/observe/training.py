"""Training: one row for every optimizer step and every eval epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from paceline.domain.batch import Batch
from paceline.domain.commands import FinishRun, NoteLengths, NoteStale, ReportEval, ShipBatch
from paceline.domain.events import BatchShipped, RunOpened, StepTrained, WeightsLoaded
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName, RolloutId, Version
from paceline.observe.account import Account
from paceline.observe.fold import Fold, Handler
from paceline.observe.lengths import Lengths
from paceline.observe.lives import Life, LifeWatcher, Lives, Shipped
from paceline.observe.rows import Row
from paceline.observe.window import Window


def staleness(batch: Batch, oldest: Version) -> int:
    """Optimizer steps between the batch's training and the sampling of its oldest token. For display."""
    return batch.trains - oldest


_LENGTHS = (
    "median",
    "deviation",
    "group_share",
    "runaways",
    "p90",
    "judged",
    "mean_rank",
    "inside_half",
    "inside_90",
)


class _Open:
    """The row of a step that was cut and is not acknowledged."""

    __slots__ = ("shipped_at", "values")

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values
        self.shipped_at: float | None = None


class Training(LifeWatcher, Fold):
    """Makes rows. Fold `lives` first; `keep` bounds the step rows kept here, for a long live run."""

    def __init__(self, lives: Lives, account: Account, lengths: Lengths, keep: int | None = None) -> None:
        self.steps: deque[Row] = deque(maxlen=keep)
        self.evals: list[Row] = []
        self.segment = 0
        self._lives, self._account, self._lengths = lives, account, lengths
        self._listeners: tuple[Callable[[Row], None], ...] = ()
        self._windows: dict[EnvName, Window] = {}
        self._open: dict[int, _Open] = {}
        self._drawn: dict[EnvName, int] = {}
        self._shipped: dict[EnvName, int] = {}
        self._oldest: dict[RolloutId, Version] = {}
        self._flags: set[str] = set()
        self._gates: set[str] = set()
        self._cut_at: float | None = None
        self._before: dict[str, float] = {}
        self._updates: list[float] = []
        self._stale_trained = 0
        self._learnt: dict[str, float] = {}
        """What the scheduling policy last said of lengths."""
        lives.watch(self)

    def listen(self, listener: Callable[[Row], None]) -> None:
        """Call `listener` with every row from now on, as it is complete."""
        self._listeners = (*self._listeners, listener)

    def handlers(self) -> Mapping[type, Handler]:
        return {
            RunOpened: self._opened,
            ShipBatch: self._cut,
            BatchShipped: self._batch_shipped,
            StepTrained: self._step_trained,
            WeightsLoaded: self._weights_loaded,
            ReportEval: self._report_eval,
            NoteStale: self._note_stale,
            NoteLengths: self._note_lengths,
            FinishRun: self._finish,
        }

    # ── the window ──

    def on_start(self, at: float, life: Life) -> None:
        if life.split == "train" and life.id.attempt == 0 and not life.put_off:
            self._drawn[life.env] = self._drawn.get(life.env, 0) + 1

    def on_group(self, at: float, env: EnvName, result: GroupResult) -> None:
        self._window(env).group(result)

    def on_verdict(self, at: float, life: Life) -> None:
        self._flags.update(life.flags)
        self._window(life.env).finalised(life)

    def on_settled(self, at: float, life: Life, shipped: Shipped | None) -> None:
        if life.refused_by:
            self._gates.add(life.refused_by)
            self._window(life.env).refuse(life)
        if life.fate == "shipped":
            self._shipped[life.env] = self._shipped.get(life.env, 0) + 1
            self._window(life.env).ship(life)
            if life.oldest is not None:
                self._oldest[life.id] = life.oldest

    def _window(self, env: EnvName) -> Window:
        if (window := self._windows.get(env)) is None:
            window = self._windows[env] = Window()
        return window

    # ── the rows ──

    def _opened(self, at: float, event: RunOpened) -> None:
        if event.recovered:  # nothing is lost: what waits for the trainer still does
            self.segment += 1
            self._cut_at = at
            return
        self._flush(at)
        if event.resumed_from is not None or self._cut_at is not None:  # not the first to open it
            self.segment += 1
            self._windows = {}
        self._cut_at = at

    def _cut(self, at: float, command: ShipBatch) -> None:
        batch = command.batch
        for sample in batch.samples:
            self._window(sample.env).sample(sample)
        values = self._window_values()
        values |= self._staleness(batch)
        values |= self._tokens(at, batch)
        if self._updates:
            values["time/update_s"] = sum(self._updates) / len(self._updates)
        values |= self._learnt
        values["in_flight/train"] = self._lives.in_flight["train"]
        values["in_flight/eval"] = self._lives.in_flight["eval"]
        values["queued"] = len(self._lives.queue)
        values["tokens/stale_trained"], self._stale_trained = self._stale_trained, 0
        self._open[batch.step] = _Open(values)
        self._windows, self._oldest, self._updates = {}, {}, []
        self._cut_at = at

    def _note_lengths(self, at: float, command: NoteLengths) -> None:
        for name in _LENGTHS:
            value = getattr(command, name)
            if value is not None:
                self._learnt[f"lengths/{command.env}/{name}"] = float(value)

    def _window_values(self) -> dict[str, float]:
        flags, gates = sorted(self._flags), sorted(self._gates)
        total = Window()
        values: dict[str, float] = {}
        drawn, shipped = sum(self._drawn.values()), sum(self._shipped.values())
        bias = {entry.env: entry.ratio for entry in self._lengths.bias()}
        for env in sorted(self._windows | self._drawn):
            window = self._windows.get(env) or Window()
            total.add(window)
            values |= {f"train/{env}/{name}": value for name, value in window.values(flags, gates).items()}
            if drawn:
                values[f"train/{env}/drawn_share"] = self._drawn.get(env, 0) / drawn
            if shipped:
                values[f"train/{env}/shipped_share"] = self._shipped.get(env, 0) / shipped
            if (ratio := bias.get(env)) is not None:
                values[f"train/{env}/length_bias"] = ratio
        return {f"train/all/{name}": value for name, value in total.values(flags, gates).items()} | values

    def _staleness(self, batch: Batch) -> dict[str, float]:
        oldest = dict(self._oldest)
        fresh: dict[RolloutId, Version] = {}
        for sample in batch.samples:
            if sample.trainable_tokens:
                version = sample.oldest_version
                fresh[sample.rollout] = min(version, fresh.get(sample.rollout, version))
        ages = [staleness(batch, version) for version in (oldest | fresh).values()]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}

    def _tokens(self, at: float, batch: Batch) -> dict[str, float]:
        tallies = self._lives.tallies.values()
        now: dict[str, float] = {
            "tokens/sampled": self._lives.sampled_tokens,
            "tokens/prefill": sum(tally.prefill for tally in tallies),
            "tokens/prefill_cached": sum(tally.cached for tally in tallies),
            "tokens/prefill_recomputed": sum(tally.recomputed for tally in tallies),
        }
        for fate, count in self._account.settled_tokens().items():
            now[f"tokens/to/{fate}"] = count
        values = {name: count - self._before.get(name, 0) for name, count in now.items()}
        self._before = now
        values["batch/rollouts"] = len(batch.rollouts)
        values["batch/tokens"] = batch.tokens
        if (goodput := self._account.goodput()) is not None:
            values["goodput"] = goodput
        if self._cut_at is not None and at > self._cut_at:
            seconds = values["time/step_s"] = at - self._cut_at
            values["throughput/sampled"] = values["tokens/sampled"] / seconds
            values["throughput/shipped"] = values.get("tokens/to/shipped", 0) / seconds
        return values

    def _batch_shipped(self, at: float, event: BatchShipped) -> None:
        if (row := self._open.get(event.step)) is not None:
            row.shipped_at = at
            row.values |= {
                "batch/bytes": event.bytes,
                "time/pack_s": event.pack_s,
                "time/send_s": event.send_s,
            }

    def _step_trained(self, at: float, event: StepTrained) -> None:
        # Acknowledged without a cut: the last batch of the process that this one resumes.
        row = self._open.pop(event.step, None) or _Open({})
        if row.shipped_at is not None:
            row.values["time/train_s"] = at - row.shipped_at
        row.values |= {f"trainer/{name}": value for name, value in event.metrics.items()}
        self._emit_step(at, event.step, row)

    def _weights_loaded(self, at: float, event: WeightsLoaded) -> None:
        if event.error is None:
            self._updates.append(event.seconds)

    def _report_eval(self, at: float, report: ReportEval) -> None:
        prefix = f"eval/{report.env}"
        values: dict[str, float] = {
            f"{prefix}/rollouts": report.rollouts,
            f"{prefix}/scored": report.scored,
            f"{prefix}/length": report.mean_tokens,
            f"{prefix}/newest_version": report.newest_version,
        }
        if report.mean_reward is not None:
            values[f"{prefix}/reward"] = report.mean_reward
        for k, share in report.pass_at.items():
            values[f"{prefix}/pass@{k}"] = share
        if report.rollouts:
            for ending, count in report.by_ending.items():
                values[f"{prefix}/{ending}"] = count / report.rollouts
        row = Row(
            kind="eval", at=at, segment=self.segment, step=report.version, env=report.env, values=values
        )
        self.evals.append(row)
        self._emit(row)

    def _note_stale(self, at: float, command: NoteStale) -> None:
        if command.action == "trained":
            self._stale_trained += command.tokens

    def _finish(self, at: float, command: FinishRun) -> None:
        self._flush(at)

    def _flush(self, at: float) -> None:
        """Rows of steps that the trainer has not acknowledged, and now will not."""
        for step, row in sorted(self._open.items()):
            self._emit_step(at, step, row, trained=False)
        self._open = {}

    def _emit_step(self, at: float, step: int, open_: _Open, trained: bool = True) -> None:
        row = Row(kind="step", at=at, segment=self.segment, step=step, values=open_.values, trained=trained)
        self.steps.append(row)
        self._emit(row)

    def _emit(self, row: Row) -> None:
        for listener in self._listeners:
            listener(row)
