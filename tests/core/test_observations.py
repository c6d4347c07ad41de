"""What an environment said after an answer gets a weight of its own; nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import BatchSection, EnvSection, FiltersSection
from paceline.core.observations import STREAM, observed
from paceline.core.processing import GroupRules
from paceline.core.samples import build_samples
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef


def turn(prompt: int, sampled: int, *roles: tuple[str, int], extends: bool = True, after: int = -1) -> Turn:
    return Turn(
        np.arange(prompt, dtype=np.int32),
        np.arange(sampled, dtype=np.int32),
        np.full(sampled, -0.5, np.float32),
        ((0, sampled),),
        extends,
        "stop",
        after=after,
        roles=roles,
    )


def weights(*turns: Turn, seq_len: int = 100) -> list[list[float]]:
    rollout = Rollout(
        id=RolloutId(0, 0), task=TaskRef("e", "train", 0), outcome=COMPLETED, turns=turns, reward=1.0
    )
    samples = build_samples(rollout, seq_len=seq_len, overlong="cut").samples
    return [stream_of(sample) for sample in observed(rollout, samples, 0.25)]


def stream_of(sample: Sample) -> list[float]:
    stream = sample.streams.get(STREAM)
    if stream is None:
        return []
    assert len(stream) == sample.tokens
    assert not (stream[sample.trainable] > 0).any()
    return [float(w) for w in stream]


OPENING = turn(4, 2, ("", 1), ("user", 2), ("", 1), extends=False)


def test_observations_are_weighed_and_the_task_and_the_markup_are_not() -> None:
    second = turn(5, 1, ("", 1), ("tool", 2), ("", 1), ("user", 1))
    assert weights(OPENING, second) == [[0] * 6 + [0, 0.25, 0.25, 0, 0.25] + [0]]


def test_a_single_turn_has_none() -> None:
    assert weights(OPENING) == [[]]


def test_a_fork_weighs_only_what_it_adds_and_a_history_rendered_anew_nothing() -> None:
    second = turn(2, 1, ("tool", 2))
    fork = turn(3, 1, ("tool", 1), ("", 2), after=0)
    anew = turn(4, 1, ("user", 2), ("tool", 2), extends=False)
    assert weights(OPENING, second, fork, anew) == [
        [0] * 6 + [0.25, 0.25, 0],
        [0] * 6 + [0.25, 0, 0, 0],
        [],
    ]


def test_a_sample_that_was_cut_keeps_the_weights_of_what_is_left() -> None:
    second = turn(3, 1, ("tool", 3))
    assert weights(OPENING, second, seq_len=8) == [[0] * 6 + [0.25, 0.25]]


def test_the_weight_comes_from_the_config() -> None:
    section = EnvSection(id="reverse-text", observation_weight=0.5)
    assert GroupRules.of(section, BatchSection(), FiltersSection()).observation_weight == 0.5
    with pytest.raises(ValueError, match="observation_weight"):
        EnvSection(id="reverse-text", observation_weight=-1)
