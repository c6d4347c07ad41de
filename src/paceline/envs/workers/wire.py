"""What crosses between the orchestrator and a worker: msgspec records, as msgpack, in frames.

A frame is its length (four bytes, little-endian) and a msgpack array of records: whatever one side says within one
turn of its loop goes out as one frame. Every record names its kind, and one that is not of the union is refused.

`call` numbers a rollout at its worker; `ask` numbers a question within it (or, for those without a call, at the
worker), so that an answer finds who asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from paceline.domain.ids import RolloutId
from paceline.domain.rollout import FailureCause, Finish, Limit
from paceline.domain.task import Split, TaskRef
from paceline.errors import EnvError

LENGTH_BYTES: Final = 4
MOST_BYTES: Final = 256 * 2**20
"""Longest frame: a length beyond it is no frame of ours."""

_ARRAY: Final = b"\xdd"
_ARRAY_BYTES: Final = 5
"""Of msgpack's head of an array of any length."""


class TooLarge(EnvError):
    """A record that no frame holds: it is not sent."""


class _Record(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


# ── to the worker ──


class Open(_Record, frozen=True):
    """Import an environment and make it. Answered by `Opened`."""

    env_id: str
    args: dict[str, Any]
    label: str
    split: Split
    group_size: int
    path: tuple[str, ...] = ()
    """Folders to look for its module in, before all others."""


class Start(_Record, frozen=True):
    """Carry out a rollout. Answered by exactly one `Ended`, however it ends."""

    call: int
    rollout: RolloutId
    task: TaskRef
    group_seed: int
    noise_seed: int
    seconds: float
    """Until the deadline."""


class Said(_Record, frozen=True):
    """The model's last words."""

    text: str
    finish: Finish
    token_ids: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32, little-endian."""


class Replied(_Record, frozen=True):
    """Answers `Ask`: the model spoke."""

    call: int
    ask: int
    said: Said


class Refused(_Record, frozen=True):
    """Answers `Ask`, `BeginServe`, `EndServe`, `BeginCold` or `AskService`: it did not work out."""

    call: int
    ask: int
    kind: Literal["truncated", "engine", "cancelled", "error"]
    text: str
    limit: Limit | None = None


class Serving(_Record, frozen=True):
    """Answers `BeginServe`: where programs reach the rollout's model, and with which secret."""

    call: int
    ask: int
    base_url: str
    secret: str


class Unserved(_Record, frozen=True):
    """Answers `EndServe`: no call of the programs runs any more."""

    call: int
    ask: int
    said: Said | None
    """What the model said last."""


class Served(_Record, frozen=True):
    """Answers `AskService`, and `BeginCold` with None."""

    ask: int
    value: Any


class Judge(_Record, frozen=True):
    """A limit has ended the rollout: ask the environment what it is worth. Answered by `Ended`."""

    call: int
    limit: Limit
    seconds: float
    said: Said | None
    """What the model said last, where that was cut short; else the worker has it."""


class Cancel(_Record, frozen=True):
    """Cancel what a call is doing now."""

    call: int


class Forget(_Record, frozen=True):
    """A call is over: nothing of it will be asked for again."""

    call: int


class Close(_Record, frozen=True):
    """Close the environment, and end."""


# ── from the worker ──


class Opened(_Record, frozen=True):
    """The environment is there, or `error` says why not."""

    size: int | None = None
    fingerprint: str = ""
    all_or_nothing: bool = False
    whole_group: bool = False
    replayable: bool = False
    roles: tuple[str, ...] = ()
    has_tools: bool = False
    error: str = ""
    pid: int = 0


class Ask(_Record, frozen=True):
    """A model call. Answered by `Replied` or `Refused`."""

    call: int
    ask: int
    method: Literal["chat", "complete", "generate"]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    token_ids: bytes = b""
    """For `generate`: int32, little-endian."""


class GiveUp(_Record, frozen=True):
    """The environment does not wait for an answer any more."""

    call: int
    ask: int


class BeginServe(_Record, frozen=True):
    """Programs of the rollout want to ask its model. Answered by `Serving` or `Refused`; until `EndServe`."""

    call: int
    ask: int


class EndServe(_Record, frozen=True):
    """The programs that `serving` was begun for are over. Answered by `Unserved` or `Refused`."""

    call: int
    ask: int
    serving: int
    """The `ask` of its `BeginServe`."""


class BeginCold(_Record, frozen=True):
    """A place for setting a sandbox up, please. Answered by `Served`; given back by `EndCold` or the worker's end."""

    ask: int


class EndCold(_Record, frozen=True):
    """The sandbox of `BeginCold` is up, or given up."""

    ask: int


class AskService(_Record, frozen=True):
    """Ask a service of the run. Answered by `Served` or `Refused` (call 0)."""

    ask: int
    service: str
    request: Any


class Told(_Record, frozen=True):
    """The environment's `Result`. Numbers are judged by the runner, as those of an inline one."""

    reward: Any
    rewards: Any
    metrics: Any
    truncated: Any
    info: Any
    turn_rewards: Any
    role: str
    trains: bool


class Failure(_Record, frozen=True):
    """What the environment raised, in words."""

    kind: FailureCause | Literal["truncated", "cancelled"]
    text: str
    """`Type: text (file:line)`."""
    limit: Any = None
    """What a `RolloutTruncated` named."""
    interrupted: bool = False
    """Whether it comes of an interruption: a limit, or a cancellation."""


class Ended(_Record, frozen=True):
    """Answers `Start` and `Judge`: the environment's code has returned or raised, and is not running any more."""

    call: int
    told: Told | None = None
    failure: Failure | None = None


class Pulse(_Record, frozen=True):
    """The worker's loop turns."""

    rollouts: int
    rss_mb: float
    lag_ms: float
    """How late its loop was, at worst, since the last pulse."""


ToWorker: TypeAlias = (
    Open | Start | Replied | Refused | Serving | Unserved | Served | Judge | Cancel | Forget | Close
)
FromWorker: TypeAlias = (
    Opened | Ask | GiveUp | BeginServe | EndServe | BeginCold | EndCold | AskService | Ended | Pulse
)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not JSON-like")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_from_worker = msgspec.msgpack.Decoder(list[FromWorker])


def encoded(record: _Record) -> bytes:
    """One record. TypeError for what is not JSON-like, TooLarge for what no frame holds."""
    body = _encoder.encode(record)
    if len(body) > MOST_BYTES - _ARRAY_BYTES:
        raise TooLarge(
            f"{type(record).__name__} of {len(body) / 2**20:.0f} MiB: at most {MOST_BYTES / 2**20:.0f} MiB cross "
            "between the orchestrator and a worker; say, return or ask less at once"
        )
    return body


def storable(value: Any) -> str:
    """What keeps a value from crossing; empty if nothing does."""
    try:
        _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        return str(error)
    return ""


def frames(records: Sequence[bytes]) -> Iterator[bytes]:
    """Encoded records as frames, each with its length in front: one, unless they are more than a frame holds."""
    first, size = 0, _ARRAY_BYTES
    for at, record in enumerate(records):
        if size + len(record) > MOST_BYTES:
            yield _frame(records[first:at])
            first, size = at, _ARRAY_BYTES
        size += len(record)
    if first < len(records):
        yield _frame(records[first:])


def _frame(records: Sequence[bytes]) -> bytes:
    body = b"".join((_ARRAY, len(records).to_bytes(_ARRAY_BYTES - 1, "big"), *records))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(head: bytes) -> int:
    """Bytes that follow. EnvError when that is no frame of ours."""
    length = int.from_bytes(head, "little")
    if length > MOST_BYTES:
        raise EnvError(f"a worker's frame says that it has {length} bytes; at most {MOST_BYTES} are taken")
    return length


def for_worker(body: bytes) -> list[ToWorker]:
    """EnvError when the frame holds something else."""
    try:
        return _to_worker.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EnvError(f"a frame for a worker cannot be read: {error}") from error


def from_worker(body: bytes) -> list[FromWorker]:
    """EnvError when the frame holds something else."""
    try:
        return _from_worker.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EnvError(f"a worker's frame cannot be read: {error}") from error
