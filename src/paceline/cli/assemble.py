"""Puts a run together from its config: processes, engines, environments, core, driver; and takes it apart again.

config ─▶ run directory ─▶ children (engine, trainer) ─▶ engines ─▶ core (restored) ─▶ driver ─▶ report
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli.calm import calm_gc
from paceline.cli.children import close_children, start_trainer
from paceline.cli.continuing import Left, left_by
from paceline.cli.disk import DiskMeter
from paceline.cli.engines import RunEngines
from paceline.cli.environments import Environments, own_gates, own_samplers
from paceline.cli.phases import Phases, Say
from paceline.cli.resume import Resumption
from paceline.cli.services import ConfiguredServices, imported
from paceline.cli.status import INTERRUPTED, StatusFile
from paceline.cli.stopping import CutOff, Stopped, StoppedTwice, Stopping, unstoppable
from paceline.cli.storing import Storing
from paceline.cli.trainer import versions_kept
from paceline.config import (
    EmbeddedEngine,
    EnvSection,
    EvalSection,
    ReferenceTrainer,
    RunConfig,
    UnbiasedTailScheduling,
)
from paceline.core.admission.choice import admission_of
from paceline.core.advantages import Algorithm, build, builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.scheduling import scheduling_of
from paceline.core.setup import core_setup
from paceline.core.unsettled import unsettled
from paceline.domain import events as on
from paceline.domain.commands import FinishRun, ShipBatch
from paceline.domain.ids import EnvName
from paceline.errors import ConfigError, EnvError, said_by
from paceline.journal.partial import PartStore
from paceline.ports import Engine
from paceline.runtime.checkpoints import Checkpoints
from paceline.runtime.driver import Driver, Fold, first_cause
from paceline.runtime.gateway import Gateway
from paceline.runtime.in_order import InOrder
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.loads import poll_load
from paceline.runtime.offload import Threads
from paceline.runtime.processes import ChildProcess
from paceline.runtime.processor import EnvProcessing, GroupProcessor, Processor
from paceline.runtime.quiet import QuietWatch
from paceline.runtime.room import NoRoom, Room
from paceline.runtime.runner import RolloutRunner
from paceline.runtime.standstill import StandstillWatch
from paceline.tokens.bridge import Bridge
from paceline.tokens.tokenizer import ChatTokenizer, resolve_model_dir
from paceline.transport.filesystem import FilesystemBatches, FilesystemPolicy
from paceline.transport.layout import weights_dir

_STILL_S = 60.0
"""Seconds that the loop may stand still beyond the longest deadline."""


class Earlier(msgspec.Struct, frozen=True):
    """What a run's journal holds of its earlier lives."""

    until: float = 0.0
    """Where the run's clock stopped, in seconds; it goes on from there."""
    acknowledged: int = 0
    """The last step whose acknowledgement was recorded. A trainer trains on a little when a run has been stopped."""


def algorithm_of(name: str, args: Mapping[str, Any]) -> Algorithm:
    """A built-in algorithm, or the user's own by import path. ConfigError when there is none, or it does not fit."""
    if ":" not in name:
        return builtin(name, args)
    return build(name, imported(name, f"algorithm {name!r}"), args)


def _check_groups(config: RunConfig, scores_groups: Mapping[EnvName, bool]) -> None:
    """ConfigError where an environment says of itself what its config does not: that it scores groups whole."""
    for env in config.env:
        whole = scores_groups[env.label] if env.all_or_nothing is None else env.all_or_nothing
        if whole and isinstance(config.scheduling, UnbiasedTailScheduling):
            raise ConfigError(
                f"env {env.label!r} scores groups whole, but scheduling.type 'unbiased_tail' puts rollouts off one by "
                "one: use another scheduling.type, or set all_or_nothing = false"
            )


class Assembly:
    """One run, from its directory to its end."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        run_id: str,
        resumption: Resumption | None = None,
        *,
        status: StatusFile,
        earlier: Earlier | None = None,
        config_number: int = 0,
        lock_fd: int | None = None,
        may_exit: bool = False,
    ) -> None:
        """`status` gets the run's end before the children are closed: the trainer ends, and saves, by it.

        `earlier` says what the journal already holds, `config_number` by which number the run directory keeps `config`.
        `lock_fd` is what the children hold open as long as they live. `may_exit`: this process is the run's own, and is
        ended when the run does not stop in time; else stopping takes as long as the slowest part.
        """
        self.config = config
        self.run_dir = run_dir
        self.run_id = run_id
        self.resumption = resumption
        self._status = status
        self.model_dir = resolve_model_dir(config.model.name)
        self.children: list[ChildProcess] = []
        self._earlier = earlier or Earlier()
        self._config_number = config_number
        self._inherit = () if lock_fd is None else (lock_fd,)
        self.stopping = Stopping(
            config.run.drain_s,
            [section.id for section in self._env_sections],
            CutOff(status, self.children) if may_exit else None,
        )
        self._driver: Driver | None = None
        self._core: Core | None = None
        self.disk = DiskMeter(run_dir)
        self._storing: Storing | None = None
        self._tell: Say = _unsaid

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight, over all engines."""
        return 0 if self._core is None else self._core.fleet.cap()

    @property
    def _env_sections(self) -> tuple[EnvSection | EvalSection, ...]:
        return (*self.config.env, *self.config.eval)

    @property
    def start_version(self) -> int:
        return self.resumption.trained if self.resumption else 0

    def run(self, folds: list[Fold], say: Say, phase: Say) -> FinishRun:
        """Everything, from starting the children to closing them. Raises what ended the run.

        `phase` is told what the run does before its first rollout. Ctrl-C or SIGTERM once drains and saves
        (`FinishRun` says `stopped`), or ends the start (`Stopped`); twice stops at once (`StoppedTwice`).
        """
        with asyncio.Runner() as runner:
            try:
                return runner.run(self._run_on_loop(folds, say, phase))
            except (SystemExit, KeyboardInterrupt) as error:
                if not self.stopping.hears:
                    raise
                # Of a task or a callback that an environment left on the loop: a rollout's own is caught with it.
                raise self.stopping.ended_by_code(f"{said_by(error)} was raised") from error

    async def _run_on_loop(self, folds: list[Fold], say: Say, phase: Say) -> FinishRun:
        stopping = self.stopping
        watch = StandstillWatch(_still(say), self._still_too_long, self._still_limit_s())
        with stopping.signals(), unstoppable(asyncio.get_running_loop()), contextlib.closing(watch):
            try:
                finish = await self._run(folds, say, Phases(phase))
                stopping.ended()
                return finish
            except asyncio.CancelledError:
                if stopping.requests:
                    raise Stopped("stopped before the first rollout was started") from None
                if not stopping.hears:
                    raise
                raise stopping.cancelled_by_code() from None

    async def _run(self, folds: list[Fold], say: Say, phases: Phases) -> FinishRun:
        config = self.config
        self._tell = phases.now
        phases.now("loading the tokenizer and the environments")
        tokenizer = ChatTokenizer.load(self.model_dir, config.model.chat_template)
        environments = Environments()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(environments.close)
            stack.push_async_callback(self._close_children)
            try:
                services = ConfiguredServices(config.services, config.chat)
                stack.push_async_callback(services.close)
                await environments.start(
                    config,
                    Bridge(tokenizer),
                    logs=self.run_dir / "logs",
                    ask=services.call,
                    inherit=self._inherit,
                )
                engines = RunEngines(config, self.run_dir, self.children, self._inherit)
                stack.push_async_callback(engines.close)
                await self._start_children(engines, phases)
                storing = self._storing = Storing(self.run_dir, self.run_id, config.journal)
                journal = storing.journal
                stack.push_async_callback(journal.close)
                # Packing and saving take long; groups must not queue behind them.
                groups, offload = Threads(), Threads()
                stack.callback(groups.close)
                stack.callback(offload.close)
                processor = self._processor(environments, groups, services)
                gateway = Gateway(config.gateway, tokenizer, config.model.served_name)
                stack.push_async_callback(gateway.close)
                left = left_by(self.resumption, environments.runtimes)
                parts = PartStore(
                    self.run_dir,
                    self.run_id,
                    journal,
                    goes_on=left.goes_on,
                    fsync_s=config.journal.fsync_s,
                )
                stack.push_async_callback(parts.close)
                finish = await self._drive(
                    environments, engines, storing, processor, offload, gateway, left, parts, folds, say
                )
            except StoppedTwice as stopped:
                self._status.finish("stopped", str(stopped), code=INTERRUPTED)
                raise
            except asyncio.CancelledError:
                asked = self.stopping.requests
                if self.stopping.hears and not asked:
                    self._status.fail(self.stopping.cancelled_by_code())
                else:
                    self._status.finish("stopped", "interrupted", code=0 if asked else INTERRUPTED)
                raise
            except BaseException as error:
                self._status.fail(error)
                raise
            self._status.finish(finish.status, finish.reason)
            return finish

    async def _drive(
        self,
        environments: Environments,
        engines: RunEngines,
        storing: Storing,
        processor: Processor,
        offload: Threads,
        gateway: Gateway,
        left: Left,
        parts: PartStore,
        folds: list[Fold],
        say: Say,
    ) -> FinishRun:
        config, journal = self.config, storing.journal
        _check_groups(config, environments.scores_groups)
        core = Core(
            core_setup(
                config,
                environments.sizes,
                environments.fingerprints,
                whole_groups=environments.whole_groups,
                samplers=own_samplers(config),
                gates=own_gates(config),
            ),
            admission_of(config, environments.scores_groups),
            scheduling_of(config),
        )
        if self.resumption is not None:
            resumption = self.resumption
            core.restore(resumption.state, resumption.trained, str(self._weights_now()), resumption.rollouts)
            for warning in core.warnings:
                say(f"warning: {warning}")
            shipping = [command.batch for command in resumption.owed if isinstance(command, ShipBatch)]
            journal.needs(unsettled(core), {batch.step: batch.rollouts for batch in shipping})
        core.count_from(journal.next_seq)
        self._core = core
        inbox = Inbox()
        gates = Gates(inbox)
        loop = asyncio.get_running_loop()
        began = loop.time() - self._earlier.until

        def clock() -> float:
            return loop.time() - began

        runner = RolloutRunner(
            environments.runtimes,
            engines.slots,
            gates,
            clock,
            noise_by_position=isinstance(config.engine, EmbeddedEngine),
            gateway=gateway,
            parts=parts,
            left=left.goes_on,
        )
        runner.on_note = lambda note: say(f"warning: {note}")
        if left.goes_on or left.ended:
            say(
                f"{len(left.goes_on)} rollouts go on with {left.tokens} tokens, {len(left.ended)} are begun again"
            )
        room = Room(post=inbox.post, tell=self._tell, fail=self._no_room, limit_s=config.journal.full_disk_s)
        storing.attach(room)
        folds = [*folds, parts]
        if config.run.deterministic:
            processor = in_order = InOrder(processor, core, runner.on_note)
            folds.append(in_order)
        driver = Driver(
            core,
            inbox=inbox,
            gates=gates,
            runner=runner,
            engines=engines.slots,
            processor=processor,
            sink=FilesystemBatches(self.run_dir, self.run_id, keep=versions_kept(config)),
            policy=FilesystemPolicy(
                self.run_dir,
                self.run_id,
                after=self.start_version,
                acknowledged=self._earlier.acknowledged,
            ),
            journal=journal,
            checkpoints=self.checkpoints(),
            packing=config.batch,
            offload=offload,
            folds=folds,
            clock=clock,
            step_limit_s=config.trainer.step_s,
            revive=engines.revive,
            durable_first=config.journal.fsync_s == 0,
            room=room,
        )
        for child in self.children:
            if child.name == "trainer":
                driver.beside(child.name, partial(self.stopping.watch_trainer, child))
        driver.beside("journal", storing.watch)
        driver.beside("disk meter", partial(self.disk.run, storing.room_for))
        quiet = QuietWatch(core, lambda text: say(f"warning: {text}"), clock, config.run.quiet_s)
        driver.beside("quiet watch", quiet.run)
        driver.beside("load polls", lambda: engines.follow_list(inbox.post, self._polling(inbox)))
        for name in engines.slots:
            driver.beside(f"watch over {name}", partial(engines.watch, name, inbox.post))
        goes_on = self.resumption
        opened = on.RunOpened(
            self.run_id,
            config.run.seed,
            None if goes_on is None else goes_on.step,
            recovered=goes_on is not None and goes_on.rollouts is not None,
            checkpoint=0 if goes_on is None else goes_on.checkpoint,
            trained=None if goes_on is None else goes_on.trained,
            weights="" if goes_on is None else str(self._weights_now()),
            continues=tuple(left.goes_on),
            forgives=() if goes_on is None else goes_on.forgives,
            config=self._config_number,
        )
        driver.when_failing(self._failing)
        self._driver = driver
        self.stopping.drives(driver, inbox)
        with calm_gc():
            return await driver.run(
                opened,
                engines.joined(),
                ended=left.ended,
                owed=goes_on.owed if goes_on else (),
            )

    def _no_room(self, error: NoRoom) -> None:
        if self._driver is not None:
            self._driver.fail(error)

    def _polling(self, inbox: Inbox) -> Callable[[Engine], Any]:
        interval = self.config.metrics.load_interval_s
        return lambda engine: poll_load(engine, inbox.post, interval_s=interval)

    def _processor(
        self, environments: Environments, offload: Threads, services: ConfiguredServices
    ) -> GroupProcessor:
        config = self.config
        envs = {}
        for section in config.env:
            chosen = section.algorithm or config.algorithm
            rules = GroupRules.of(
                section,
                config.batch,
                config.filters,
                scores_groups=environments.scores_groups[section.label],
            )
            envs[section.label] = EnvProcessing(rules, algorithm_of(chosen.name, chosen.args))
        return GroupProcessor(envs, offload, services)

    # ── children ──

    async def _start_children(self, engines: RunEngines, phases: Phases) -> None:
        """Engines and trainer start side by side; when one fails, the others are not left starting."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engines.start(self.start_version, self._weights_now(), phases.during))
                if isinstance(self.config.trainer, ReferenceTrainer):
                    tasks.create_task(self._start_trainer(self.config.trainer, phases))
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            raise cause from cause.__cause__

    async def _start_trainer(self, section: ReferenceTrainer, phases: Phases) -> None:
        with phases.during("starting the trainer"):
            trainer = await start_trainer(
                self.config,
                section,
                self.run_dir,
                self.model_dir,
                version=self.start_version,
                inherit=self._inherit,
            )
        self.children.append(trainer)

    async def _close_children(self) -> None:
        await close_children(self.children, self.stopping, done=self._status.status.status == "done")

    # ── where things are ──

    def checkpoints(self) -> Checkpoints:
        folder = self.run_dir / "checkpoints" / "core"
        return Checkpoints(folder, self.config.checkpoint.keep_last, self.run_id)

    def _weights_now(self) -> Path:
        return weights_dir(self.run_dir, self.start_version) if self.start_version else self.model_dir

    # ── stopping ──

    def _failing(self, error: BaseException) -> None:
        if self._storing is not None:
            self._storing.give_up()
        self.stopping.failing(error)

    def _still_limit_s(self) -> float:
        """Longer than the deadline of any rollout: one that blocks the loop cannot be cut at it."""
        limits = [section.limits for section in self._env_sections]
        return max(limit.deadline_s + limit.score_s for limit in limits) + _STILL_S

    def _still_too_long(self, seconds: float, place: str) -> None:
        self.stopping.cut_off_now(
            EnvError(
                f"the event loop has stood still for {seconds:.0f} s, longer than any rollout may take, at {place}: code "
                "there blocks all rollouts; await instead, or run it with ctx.in_thread"
            )
        )


def _still(say: Say) -> Callable[[float, str], None]:
    def tell(seconds: float, place: str) -> None:
        say(
            f"warning: the event loop has stood still for {seconds:.0f} s, at {place}: code there blocks all rollouts; "
            "await instead, or run it with ctx.in_thread"
        )

    return tell


def _unsaid(_text: str) -> None:
    """Nobody listens yet."""
