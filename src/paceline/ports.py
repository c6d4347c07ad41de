"""The outside, as the runtime sees it: small protocols.

`runtime` calls them; `engines`, `envs`, `transport` and `journal` implement them; `paceline.testing` has a
scripted one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.batch import PackedBatch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId, Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.part import Part
from paceline.domain.rollout import Finish, VersionRuns


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How tokens are drawn: the behaviour policy. All of it travels with the rollout."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 draws from the whole vocabulary."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Keys the noise; with the embedded engine, token i of a sequence depends on (seed, i) alone."""


class GenerateRequest(msgspec.Struct, frozen=True, gc=False):
    """One engine request: exactly these ids, continued."""

    request_id: str
    token_ids: NDArray[np.int32]
    sampling: SamplingParams
    session: str = ""
    """Requests of one session should reach the same replica behind a router."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of one salt: one salt a version."""
    tell: Callable[[Sequence[int]], None] | None = None
    """Told the ids as they are sampled, by engines that can; the reply has them all again. What has been told is kept: an
    engine that tells, and then breaks off, returns what it told, with finish `abort`."""


class GenerateReply(msgspec.Struct, frozen=True, gc=False):
    """What came back. `token_ids` and `logprobs` have equal length S, checked by the client."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: Finish
    versions: VersionRuns
    """Run-length over the S ids; the counts add up to S."""
    cached_tokens: int = 0
    stop_reason: str | int | None = None


class Samples(Protocol):
    """What carries out requests."""

    @property
    def info(self) -> EngineInfo: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Carry out one request. Raises EngineError; an aborted request returns what it had sampled."""
        ...


class Engine(Samples, Protocol):
    """One inference engine (or a router's address that stands for several)."""

    async def abort(self, request_id: str) -> None:
        """Ask the engine to stop a request; its `generate` then returns with finish `abort`."""
        ...

    async def load(self) -> EngineLoad:
        """Read the engine's metrics. Raises EngineError when it does not answer in time."""
        ...

    async def update_weights(self, version: Version, path: str) -> None:
        """Pause, load, resume; returns once the engine serves `version`. Raises EngineError."""
        ...

    async def close(self) -> None: ...


class ChatReply(msgspec.Struct, frozen=True):
    """What a chat endpoint answered."""

    text: str
    finish: str | None = None
    """`stop`, `length` or what else the endpoint calls it."""
    prompt_tokens: int = 0
    """As the endpoint counts; 0 where it does not say."""
    sampled_tokens: int = 0
    tool_calls: tuple[dict[str, Any], ...] = ()
    """As the endpoint wrote them: `id`, `type`, and a `function` of `name` and `arguments`, which are JSON as text."""


class Chat(Protocol):
    """A chat endpoint: messages in, text out."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What goes into every request by configuration, and stands."""
        ...

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatReply:
        """One answer. Raises EngineError when there is none."""
        ...


class PauseMarks(Protocol):
    """Remembers, beyond the life of this process, which servers it has paused."""

    def paused(self, url: str, version: Version) -> None:
        """The server is about to be paused, to be given `version`."""
        ...

    def resumed(self, url: str) -> None:
        """It works again."""
        ...


class WeightCheck(Protocol):
    """What is made sure of whenever an engine takes new weights."""

    async def before(self, path: str) -> None:
        """Look at what is to be loaded. Raises EngineError if it is not there."""
        ...

    async def after(self, engine: Samples, version: Version, path: str) -> None:
        """Ask the engine, which says that it serves `version`. Raises EngineError if it does not."""
        ...


class Shipment(NamedTuple):
    """A batch as it lies where the trainer finds it."""

    nbytes: int
    digests: tuple[str, ...] = ()
    """Of each rank's part, in hex: equal ones are equal batches. Empty where a sink has none."""


class BatchSink(Protocol):
    """Where batches go."""

    async def ship(self, packed: PackedBatch) -> Shipment:
        """Make the batch durable for the trainer. Raises TrainerError or WireError."""
        ...


class Published(msgspec.Struct, frozen=True, gc=False):
    """Something the trainer put out: new weights, or the acknowledgement of a step, or both."""

    version: Version | None = None
    path: str = ""
    trained_step: int | None = None
    metrics: dict[str, float] = {}


class PolicySource(Protocol):
    """Where the trainer's weights and acknowledgements come from."""

    async def next(self) -> Published:
        """Wait for the next thing the trainer put out. Raises TrainerError when it is unusable."""
        ...


class Journal(Protocol):
    """Keeps events and the commands they caused, in order."""

    def append(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """Hand over one decision. Never blocks, never raises for a slow disk."""
        ...

    async def flush(self) -> None:
        """Return once everything appended so far is on disk. Raises OSError."""
        ...

    async def close(self) -> None: ...


class Parts(Protocol):
    """Keeps what rollouts under way have sampled, so that a later life can go on from it. Never blocks, never raises for
    a slow disk."""

    def keep(self, part: Part) -> None: ...

    def ended(self, rollout: RolloutId) -> None:
        """It has its record: its parts are needed no more."""
        ...


class Services(Protocol):
    """I/O that an algorithm asks for: teachers, judges, group scorers."""

    async def call(self, service: str, request: Any) -> Any:
        """Answer one request of an algorithm. Whatever it raises fails the group, with the cause."""
        ...
