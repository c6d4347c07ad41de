"""What a trainer reads: the batch of one rank, its micro-batches, and what each sequence is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import RolloutId
from paceline.domain.mostly_constant import MostlyConstant
from paceline.domain.rollout import VersionRuns


class SampleRow(NamedTuple):
    """One line of the sample table."""

    position: int
    """Of the sample in the batch, over all ranks."""
    rollout: RolloutId
    task: int
    env: str
    ending: str
    reward: float
    temperature: float
    advantage: float
    oldest_version: int | None
    tokens: int
    trainable_tokens: int
    cut_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """What the sequences are, as columns; row i is the i-th sequence that is no padding."""

    position: NDArray[np.int32]
    """Of the sample in the batch, over all ranks."""
    group: NDArray[np.int64]
    member: NDArray[np.int32]
    attempt: NDArray[np.int32]
    task: NDArray[np.int64]
    env: NDArray[np.int32]
    """Position in `envs`."""
    ending: NDArray[np.uint8]
    """Position in `endings`."""
    reward: NDArray[np.float64]
    temperature: NDArray[np.float32]
    """NaN where it differs within the sequence."""
    advantage: NDArray[np.float32]
    """NaN where it differs within the sequence."""
    oldest_version: NDArray[np.int32]
    """Oldest version that sampled a trainable token; -1 where none is trainable."""
    tokens: NDArray[np.int32]
    trainable_tokens: NDArray[np.int32]
    cut_tokens: NDArray[np.int32]
    """Trainable tokens that were cut off to fit the sequence length."""
    version_runs: tuple[VersionRuns, ...]
    envs: tuple[str, ...]
    endings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, i: int) -> SampleRow:
        oldest = int(self.oldest_version[i])
        return SampleRow(
            position=int(self.position[i]),
            rollout=RolloutId(int(self.group[i]), int(self.member[i]), int(self.attempt[i])),
            task=int(self.task[i]),
            env=self.envs[self.env[i]],
            ending=self.endings[self.ending[i]],
            reward=float(self.reward[i]),
            temperature=float(self.temperature[i]),
            advantage=float(self.advantage[i]),
            oldest_version=None if oldest < 0 else oldest,
            tokens=int(self.tokens[i]),
            trainable_tokens=int(self.trainable_tokens[i]),
            cut_tokens=int(self.cut_tokens[i]),
        )

    def __iter__(self) -> Iterator[SampleRow]:
        return (self[i] for i in range(len(self)))

    def rows(self, start: int, stop: int) -> SampleTable:
        """Some of the rows, without copying."""
        part = {
            name: value if name in ("envs", "endings") else value[start:stop]
            for name in self.__slots__
            for value in (getattr(self, name),)
        }
        return SampleTable(**part)


class WireMicroBatch:
    """Sequences packed back to back, as views of the file. Arrays have length N, the sum of `lengths`.

    What was sent as one number a sequence is expanded when it is first asked for.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        trainable: NDArray[np.bool_],
        logprobs: NDArray[np.float32],
        lengths: NDArray[np.int32],
        samples: SampleTable,
        streams: Mapping[str, NDArray[Any]],
        advantages: MostlyConstant,
        temperatures: MostlyConstant,
    ) -> None:
        self.token_ids = token_ids
        self.trainable = trainable
        """False on prompt, tool and padding tokens."""
        self.logprobs = logprobs
        """Natural log, of the distribution that was sampled from; 0.0 where not trainable."""
        self.lengths = lengths
        """int32[S]: tokens of each sequence; padding, if any, is the last."""
        self.samples = samples
        """What the first `len(samples)` sequences are."""
        self.streams = streams
        """Optional arrays [N, ...] by name."""
        self._advantages = advantages
        self._temperatures = temperatures

    @cached_property
    def advantages(self) -> NDArray[np.float32]:
        return self._advantages.expanded(self.lengths, self.trainable)

    @cached_property
    def temperatures(self) -> NDArray[np.float32]:
        return self._temperatures.expanded(self.lengths, self.trainable)

    @cached_property
    def boundaries(self) -> NDArray[np.int32]:
        """int32[S+1]: where each sequence starts, and N; what variable-length attention kernels take."""
        return np.concatenate([np.zeros(1, np.int32), np.cumsum(self.lengths, dtype=np.int32)])

    @cached_property
    def position_ids(self) -> NDArray[np.int32]:
        """int32[N]: position of each token within its sequence."""
        starts = np.repeat(self.boundaries[:-1], self.lengths)
        return np.arange(len(self.token_ids), dtype=np.int32) - starts

    @cached_property
    def sequence_ids(self) -> NDArray[np.int32]:
        """int32[N]: which sequence of this micro-batch each token belongs to."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        """int32[N]: the policy version that sampled each trainable token; -1 where not trainable."""
        out = np.full(len(self.token_ids), -1, np.int32)
        runs = [run for sample in self.samples.version_runs for run in sample]
        if runs:
            flat = np.array(runs, np.int64)
            out[self.trainable] = np.repeat(flat[:, 0], flat[:, 1])
        return out


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """What one rank trains on in one step."""

    run_id: str
    step: int
    trains: int
    """The version this batch trains; the step makes the next."""
    rank: int
    ranks: int
    digest: str
    micro_batches: tuple[WireMicroBatch, ...]
    samples: SampleTable
    """All sequences of this rank."""
