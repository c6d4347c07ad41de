"""Journals made up for the tests of `observe`: a small core and a small world that keep the contract.

Every command that needs an answer gets exactly one; groups close at their last member; failed attempts are retried;
batches are cut from the front of the list; weights load while turns wait at the gate. The numbers look like a run:
rewards rise, one environment has turns and waits, some rollouts are truncated, fail, or grow stale.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import ClosedGroup, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import COMPLETED, Message, Outcome, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef

_IDS = np.zeros(1 << 16, np.int32)
_FLOATS = np.zeros(1 << 16, np.float32)
_TRAINABLE = np.ones(1 << 16, np.bool_)
_WORDS = (
    "harbor",
    "lantern",
    "meadow",
    "copper",
    "violet",
    "signal",
    "timber",
    "marble",
    "orchard",
    "canyon",
)


class Decision(msgspec.Struct, frozen=True):
    at: float
    event: Event
    commands: tuple[Command, ...] = ()


def turn(sampled: int, *, prompt: int = 12, version: int = 0, engine: str = "e0", **more: Any) -> Turn:
    return Turn(
        prompt_ids=_IDS[:prompt],
        sampled_ids=_IDS[:sampled],
        logprobs=_FLOATS[:sampled],
        versions=((version, sampled),) if sampled else (),
        extends=True,
        finish="stop",
        engine=engine,
        **more,
    )


def sample(rollout: Rollout, *, cut: int = 0, advantage: float = 1.0) -> Sample:
    runs = tuple(run for t in rollout.turns for run in t.versions)
    sampled = rollout.sampled_tokens
    if cut:
        runs = ((runs[0][0], sampled - cut),)
    length = sampled - cut + rollout.prompt_tokens
    return Sample(
        token_ids=_IDS[:length],
        trainable=_TRAINABLE[:length],
        logprobs=_FLOATS[:length],
        versions=runs,
        rollout=rollout.id,
        env=rollout.task.env,
        task_index=rollout.task.index,
        ending=rollout.outcome.ending,
        reward=rollout.reward or 0.0,
        temperature=1.0,
        advantage=advantage,
        cut_tokens=cut,
    )


@dataclass
class EnvShape:
    """What rollouts of an environment look like."""

    name: str
    turns: tuple[int, int] = (1, 1)
    tokens: tuple[float, float] = (3.0, 0.5)
    """Mean and deviation of the log of the tokens of a turn."""
    wait_s: float = 0.0
    start: float = 0.45
    end: float = 0.93
    fail: float = 0.01
    truncate: float = 0.03


@dataclass
class Shape:
    envs: tuple[EnvShape, ...] = (EnvShape("reverse-text"),)
    evals: tuple[EnvShape, ...] = (EnvShape("reverse-text"),)
    steps: int = 8
    cap: int = 32
    group: int = 8
    batch: int = 32
    lag: int = 1
    bound: int = 2
    eval_every: int = 4
    eval_examples: int = 16
    train_s: float = 1.2
    load_s: float = 0.15
    token_s: float = 0.02
    engines: int = 1
    seed: int = 0
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class _Live:
    id: RolloutId
    task: TaskRef
    engine: str
    started: float
    turns_left: int
    context: int
    dies: str | None
    turns: list[Turn] = field(default_factory=list)
    asked: float = 0.0
    granted: float = 0.0
    gate_s: float = 0.0
    model_s: float = 0.0
    oldest: int | None = None
    messages: list[Message] = field(default_factory=list)


class World:
    """Run `World(shape).decisions` to get a whole journal."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.rng = random.Random(self.shape.seed)
        self.decisions: list[Decision] = []
        self.envs = {("train", e.name): e for e in self.shape.envs} | {
            ("eval", e.name): e for e in self.shape.evals
        }
        self.now = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0
        self._out: list[Command] = []
        self._live: dict[RolloutId, _Live] = {}
        self._groups: dict[int, tuple[TaskRef, list[Rollout], int]] = {}
        self._owed: deque[tuple[int, int, int]] = deque()
        self._eval_owed: deque[tuple[int, int, int]] = deque()
        self._verdicts: deque[tuple[Verdict, Rollout]] = deque()
        self._records: dict[RolloutId, Rollout] = {}
        self._next_group = 0
        self._drawn = 0
        self._places = 0
        self.held = {f"e{i}": 0 for i in range(self.shape.engines)}
        self._loading: set[str] = set()
        self._gate: dict[str, list[RolloutId]] = {name: [] for name in self.held}
        self._cut = 0
        self._trained = 0
        self._trainer_free = 0.0
        self._evals: dict[str, tuple[int, list[Rollout], int]] = {}
        self._evaluated: set[int] = set()
        self._finished = False
        self._run()

    # ── the world: what answers, and when ──

    def _at(self, delay: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, event))

    def _run(self) -> None:
        self._at(0.0, on.RunOpened("demo", self.shape.seed))
        for name in self.held:
            self._at(0.05, on.EngineJoined(EngineInfo(name, 65_536, 4096), 0))
        self._at(0.5, on.LoadReported("e0", self._load("e0")))
        while self._heap and not self._finished:
            self.now, _, event = heapq.heappop(self._heap)
            self._out = []
            self._decide(event)
            self.decisions.append(Decision(self.now, event, tuple(self._out)))
            for command in self._out:
                self._perform(command)

    def _load(self, engine: str) -> EngineLoad:
        running = sum(1 for live in self._live.values() if live.engine == engine and live.granted)
        used = sum(live.context for live in self._live.values() if live.engine == engine)
        return EngineLoad(running, len(self._gate[engine]), min(1.0, used / 65_536), 0)

    def _perform(self, command: Command) -> None:
        match command:
            case do.StartRollout():
                self._start(command)
            case do.GrantTurn():
                self._generate(command)
            case do.UpdateWeights():
                self._at(
                    self.shape.load_s, on.WeightsLoaded(command.engine, command.version, self.shape.load_s)
                )
            case do.ProcessGroup():
                self._at(0.01, on.GroupProcessed(self._score(command.group), 0.01))
            case do.ShipBatch():
                self._at(0.02, on.BatchShipped(command.batch.step, 9 * command.batch.tokens, 0.01, 0.01))
                ready = max(self.now, self._trainer_free) + self.shape.train_s * self.rng.uniform(0.9, 1.1)
                self._trainer_free = ready
                step = command.batch.step
                self._at(ready - self.now, on.StepTrained(step, self._trainer_metrics(step)))
                self._at(ready - self.now + 0.01, on.PolicyPublished(step, f"weights/v{step}"))
            case do.CancelRollout():
                self._at(0.01, self._end(command.rollout, Outcome("cancelled", command.cause)))
            case _:
                pass

    def _trainer_metrics(self, step: int) -> dict[str, float]:
        share = step / self.shape.steps
        return {
            "loss": -0.02 * (1 - share) + self.rng.gauss(0, 0.004),
            "mismatch_kl": abs(self.rng.gauss(2e-4, 5e-5)),
            "ess": 0.99 - 0.02 * self.rng.random(),
            "grad_norm": 0.8 - 0.4 * share + self.rng.gauss(0, 0.05),
            "lr": 3e-4,
        }

    def _skill(self, env: EnvShape, version: int) -> float:
        share = min(1.0, version / max(1, self.shape.steps * 0.8))
        return env.start + (env.end - env.start) * (1 - (1 - share) ** 2)

    def _start(self, command: do.StartRollout) -> None:
        env = self.envs[command.task.split, command.task.env]
        dice = self.rng.random()
        dies = "fail" if dice < env.fail else "truncate" if dice < env.fail + env.truncate else None
        prompt = 16 + command.task.index % 9
        live = _Live(
            command.rollout,
            command.task,
            command.engine,
            self.now,
            self.rng.randint(*env.turns),
            prompt,
            dies,
        )
        word = _WORDS[command.task.index % len(_WORDS)]
        live.messages.append(Message("user", f"Write this word backwards: {word}"))
        self._live[command.rollout] = live
        self._at(0.005, on.TurnRequested(live.id, live.context, 256))

    def _generate(self, command: do.GrantTurn) -> None:
        live = self._live[command.rollout]
        live.granted = self.now
        live.gate_s += self.now - live.asked
        env = self.envs[live.task.split, live.task.env]
        tokens = max(1, min(900, round(self.rng.lognormvariate(*env.tokens))))
        seconds = 0.02 + tokens * self.shape.token_s * (0.6 + len(self._live) / (2 * self.shape.cap))
        if live.dies == "fail":
            self._at(
                seconds / 2,
                on.SegmentEnded(
                    live.id, live.engine, (), "abort", seconds=seconds / 2, error="connection reset"
                ),
            )
            return
        ran = (command.version, tokens)
        runs: tuple[tuple[int, int], ...] = (ran,)
        done = self.now + seconds
        cached = (live.context // 16) * 16 if live.turns or live.id.member else 0
        live.context += tokens
        live.turns.append(
            msgspec.structs.replace(
                turn(tokens, prompt=live.context - tokens if not live.turns else 8, version=command.version),
                engine=live.engine, cached_tokens=cached, queued_s=self.now - live.asked, started=self.now, ended=done,
            )
        )  # fmt: skip
        live.oldest = command.version if live.oldest is None else live.oldest
        self._at(seconds, on.SegmentEnded(live.id, live.engine, runs, "stop", cached, seconds))

    def _end(self, rollout: RolloutId, outcome: Outcome) -> on.RolloutEnded:
        live = self._live[rollout]
        env = self.envs[live.task.split, live.task.env]
        reward = None
        rewards = {}
        if outcome.ending in ("completed", "truncated"):
            skill = self._skill(env, live.oldest or 0)
            easy = (live.task.index * 0.618) % 1.0 < skill * 0.25
            reward = round(min(1.0, max(0.0, 1.0 if easy else self.rng.gauss(skill, 0.22))), 3)
            rewards = {"match": reward, "format": 0.0}
        answer = _WORDS[live.task.index % len(_WORDS)][::-1]
        live.messages.append(Message("assistant", answer if (reward or 0) > 0.8 else answer[:4]))
        return on.RolloutEnded(
            Rollout(
                id=rollout,
                task=live.task,
                outcome=outcome,
                turns=tuple(live.turns),
                reward=reward,
                rewards=rewards,
                started=live.started,
                ended=self.now,
                model_s=live.model_s,
                gate_s=live.gate_s,
                messages=tuple(live.messages),
            )
        )

    # ── a small core: what it wants done ──

    def _decide(self, event: Event) -> None:
        match event:
            case on.EngineJoined():
                self._open_evals(0)
            case on.TurnRequested():
                self._ask(event)
            case on.SegmentEnded():
                self._answered(event)
            case on.RolloutEnded():
                self._rollout_ended(event.rollout)
            case on.GroupProcessed():
                self._processed(event.result)
            case on.PolicyPublished():
                for engine in self.held:
                    self._loading.add(engine)
                    self._out.append(do.UpdateWeights(engine, event.version, event.path, "published"))
            case on.WeightsLoaded():
                self._loaded(event)
            case on.StepTrained():
                self._trained = event.step
            case on.LoadReported():
                self._at(0.5, on.LoadReported("e0", self._load("e0")))
            case _:
                pass
        self._cut_batch()
        self._fill()
        done = (
            self._trained == self.shape.steps and not self._live and not self._eval_owed and not self._groups
        )
        if done and min(self.held.values()) == self.shape.steps and not self._finished:
            self._finished = True
            self._out.append(do.FinishRun("done", "the last step was trained"))

    def _ask(self, event: on.TurnRequested) -> None:
        live = self._live.get(event.rollout)
        if live is None:
            return
        live.asked = self.now
        if live.engine in self._loading:
            self._gate[live.engine].append(live.id)
        else:
            self._out.append(do.GrantTurn(live.id, live.engine, self.held[live.engine]))

    def _answered(self, event: on.SegmentEnded) -> None:
        live = self._live.get(event.rollout)
        if live is None:
            return
        live.granted = 0.0
        live.model_s += event.seconds
        live.turns_left -= 1
        env = self.envs[live.task.split, live.task.env]
        if event.error:
            self._at(0.002, self._end(live.id, Outcome("failed", "engine", event.error)))
        elif live.turns_left > 0:
            live.messages.append(Message("assistant", "8"))
            live.messages.append(Message("user", "higher"))
            self._at(
                self.rng.uniform(0.5, 1.5) * env.wait_s + 0.002,
                on.TurnRequested(live.id, live.context + 8, 256),
            )
            live.context += 8
        else:
            outcome = Outcome("truncated", "tokens") if live.dies == "truncate" else COMPLETED
            self._at(0.002 + 0.3 * env.wait_s, self._end(live.id, outcome))

    def _rollout_ended(self, rollout: Rollout) -> None:
        live = self._live.pop(rollout.id)
        if rollout.task.split == "eval":
            self._eval_ended(rollout)
            return
        retry = rollout.outcome.cause == "engine" and rollout.id.attempt == 0 and live.turns_left >= 0
        if retry and self._cut < self.shape.steps:
            self._owed.appendleft((rollout.id.group, rollout.id.member, 1))
            return
        task, ended, size = self._groups[rollout.id.group]
        ended.append(rollout)
        if len(ended) == size:
            group = ClosedGroup(rollout.id.group, task, size, tuple(ended))
            self._out.append(do.ProcessGroup(group, "its last member has ended"))

    def _eval_ended(self, rollout: Rollout) -> None:
        version, ended, size = self._evals[rollout.task.env]
        ended.append(rollout)
        self._out.append(do.ForgetGroup(rollout.id.group))
        self._groups.pop(rollout.id.group)
        if len(ended) == size:
            scored = [r.reward for r in ended if r.reward is not None]
            endings: dict[str, int] = {}
            for r in ended:
                endings[r.outcome.ending] = endings.get(r.outcome.ending, 0) + 1
            del self._evals[rollout.task.env]
            self._out.append(
                do.ReportEval(
                    rollout.task.env, version, max(self.held.values()), size, len(scored),
                    sum(scored) / len(scored) if scored else None, {}, endings,
                    sum(r.sampled_tokens for r in ended) / size,
                )
            )  # fmt: skip

    def _score(self, group: ClosedGroup) -> GroupResult:
        """What the processing thread does."""
        scored = [r for r in group.rollouts if r.reward is not None]
        mean = sum(r.reward or 0 for r in scored) / len(scored) if scored else None
        variance = (
            sum(((r.reward or 0) - mean) ** 2 for r in scored) / len(scored) if mean is not None else None
        )
        flat = variance is not None and variance < 1e-12
        verdicts = []
        for r in group.rollouts:
            self._records[r.id] = r
            if r.outcome.ending == "cancelled":
                fate = "stale" if r.outcome.cause == "stale" else "cancelled"
                verdicts.append(Verdict(r.id, fate))
            elif r.reward is None or mean is None:
                verdicts.append(Verdict(r.id, "failed"))
            elif flat:
                verdicts.append(Verdict(r.id, "zero_signal", advantage=0.0))
            elif r.sampled_tokens > 400:
                verdicts.append(Verdict(r.id, "filtered", flags=("length",), advantage=r.reward - mean))
            else:
                cut = max(0, r.sampled_tokens - 300)
                s = sample(r, cut=cut, advantage=r.reward - mean)
                verdicts.append(Verdict(r.id, "queued", samples=(s,), advantage=r.reward - mean))
        dead = None if any(v.fate == "queued" for v in verdicts) else "zero_signal" if flat else "failed"
        return GroupResult(group.id, tuple(verdicts), mean, variance, dead)

    def _processed(self, result: GroupResult) -> None:
        self._groups.pop(result.group)
        self._out.append(do.ForgetGroup(result.group))
        for verdict in result.verdicts:
            if verdict.fate == "queued":
                self._verdicts.append((verdict, self._records.pop(verdict.rollout)))
            else:
                self._records.pop(verdict.rollout)
                self._places -= 1

    def _cut_batch(self) -> None:
        step = self._cut + 1
        oldest = step - 1 - self.shape.bound
        for entry in [entry for entry in self._verdicts if (entry[1].oldest_version or 0) < oldest]:
            self._verdicts.remove(entry)
            self._places -= 1
            tokens = sum(s.trainable_tokens for s in entry[0].samples)
            self._out.append(do.NoteStale(entry[1].id, "dropped", tokens, "too old for the next step"))
        may = step <= self.shape.steps and step - 1 - min(self.held.values()) <= self.shape.lag
        if may and len(self._verdicts) >= self.shape.batch:
            taken = [self._verdicts.popleft() for _ in range(self.shape.batch)]
            self._places -= len(taken)
            samples = tuple(s for verdict, _ in taken for s in verdict.samples)
            self._out.append(do.ShipBatch(Batch(step, samples, tuple(v.rollout for v, _ in taken)), "full"))
            self._cut = step
            last = step == self.shape.steps
            for live in self._live.values():
                stale = live.oldest is not None and live.oldest < oldest + 1
                if (
                    live.task.split == "train"
                    and (last or stale)
                    and live.granted == 0.0
                    and live.turns_left > 0
                ):
                    live.turns_left = -1
                    cause = "surplus" if last else "stale"
                    self._out.append(do.CancelRollout(live.id, cause, "the batch was cut"))

    def _loaded(self, event: on.WeightsLoaded) -> None:
        self.held[event.engine] = event.version
        self._loading.discard(event.engine)
        for rollout in self._gate[event.engine]:
            if rollout in self._live and self._live[rollout].turns_left >= 0:
                self._out.append(do.GrantTurn(rollout, event.engine, event.version))
        self._gate[event.engine] = []
        if event.version % self.shape.eval_every == 0 or event.version == self.shape.steps:
            self._open_evals(event.version)

    def _open_evals(self, version: int) -> None:
        if version in self._evaluated or min(self.held.values()) < version or self._evals:
            return
        self._evaluated.add(version)
        for env in self.shape.evals:
            self._evals[env.name] = (version, [], self.shape.eval_examples)
            for index in range(self.shape.eval_examples):
                group = self._open(TaskRef(env.name, "eval", index), 1)
                self._eval_owed.append((group, 0, 0))

    def _open(self, task: TaskRef, size: int) -> int:
        group = self._next_group
        self._next_group += 1
        self._groups[group] = (task, [], size)
        return group

    def _fill(self) -> None:
        while len(self._live) + sum(isinstance(c, do.StartRollout) for c in self._out) < self.shape.cap:
            evals = sum(live.task.split == "eval" for live in self._live.values())
            if self._eval_owed and evals < max(2, self.shape.cap // 4):
                owed = self._eval_owed.popleft()
            elif self._owed:
                owed = self._owed.popleft()
            elif self._cut < self.shape.steps and self._has_place():
                env = self.shape.envs[self._drawn % len(self.shape.envs)]
                group = self._open(TaskRef(env.name, "train", self._drawn), self.shape.group)
                self._drawn += 1
                self._places += self.shape.group
                self._owed.extend((group, member, 0) for member in range(self.shape.group))
                continue
            elif self._eval_owed:
                owed = self._eval_owed.popleft()
            else:
                return
            rollout = RolloutId(*owed)
            task = self._groups[owed[0]][0]
            engine = f"e{owed[0] % self.shape.engines}"
            self._out.append(do.StartRollout(rollout, task, owed[0], owed[1], engine, self.held[engine]))
            # The world starts it when it performs the command; here it already holds a permit.

    def _has_place(self) -> bool:
        free = (min(self.held.values()) + 1 + self.shape.lag - self._cut) * self.shape.batch - self._places
        return free > 0
