"""The recorder keeps exact ids, and decides by them alone whether a turn extends what came before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.domain.rollout import Turn
from paceline.envs import Recorder
from paceline.errors import EnvError

ids = st.lists(st.integers(0, 3), max_size=6)


def array(values: list[int]) -> Any:
    return np.array(values, np.int32)


def turn(recorder: Recorder, sampled: list[int], version: int = 0) -> Turn:
    logprobs = np.full(len(sampled), -1.0, np.float32)
    recorder.segment(array(sampled), logprobs, ((version, len(sampled)),) if sampled else (), 3)
    return recorder.commit("stop", engine="e", queued_s=0.0, started=0.0, ended=0.0, segments=1)


@given(st.lists(st.tuples(ids, ids, st.booleans()), min_size=1, max_size=8))
def test_turns_concatenate_to_every_prompt_that_was_sent(
    script: list[tuple[list[int], list[int], bool]],
) -> None:
    recorder = Recorder()
    sent: list[list[int]] = []
    so_far: list[int] = []
    contexts: list[list[int]] = []
    for added, sampled, whole in script:
        prompt = (so_far if not whole else so_far[: len(so_far) // 2]) + added
        extends = recorder.prompt(array(prompt))
        assert extends == any(prompt[: len(context)] == context for context in contexts)
        assert recorder.context.tolist() == prompt
        sent.append(prompt)
        turn(recorder, sampled)
        so_far = prompt + sampled
        contexts.append(so_far)
        assert recorder.context_tokens == len(so_far)
    for number, (made, prompt) in enumerate(zip(recorder.turns, sent, strict=True)):
        before = contexts[number - 1 if made.after < 0 else made.after] if made.extends else []
        assert before + made.prompt_ids.tolist() == prompt
        assert recorder.ids_after(number).tolist() == contexts[number]
    assert recorder.sampled_tokens == sum(len(s) for _, s, _ in script)


def test_a_context_that_was_handed_out_never_changes() -> None:
    recorder = Recorder()
    recorder.prompt(array([1] * 300))
    first = recorder.context
    before = first.tolist()
    turn(recorder, [2] * 300)
    recorder.extend(array([3]))
    second = recorder.context
    recorder.roll_back()
    recorder.extend(array([4] * 900))
    assert first.tolist() == before
    assert second.tolist() == [1] * 300 + [2] * 300 + [3]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 9


def test_a_call_without_tokens_can_be_forgotten_and_one_with_tokens_cannot() -> None:
    recorder = Recorder()
    recorder.prompt(array([1, 2]))
    turn(recorder, [3])
    recorder.prompt(array([9, 9]))
    recorder.roll_back()
    assert recorder.context.tolist() == [1, 2, 3]
    recorder.extend(array([4]))
    recorder.segment(array([5]), np.array([-1.0], np.float32), ((0, 1),), 0)
    with pytest.raises(EnvError, match="cannot be rolled back"):
        recorder.roll_back()


def test_segments_join_into_one_turn_with_merged_versions() -> None:
    recorder = Recorder()
    recorder.prompt(array([1]))
    for version, token in ((4, 5), (4, 6), (5, 7)):
        recorder.segment(array([token]), np.array([-token], np.float32), ((version, 1),), token)
    assert recorder.call_tokens == 3
    made = recorder.commit("stop", engine="e", queued_s=1.0, started=2.0, ended=3.0, segments=3)
    assert made.sampled_ids.tolist() == [5, 6, 7]
    assert made.logprobs.tolist() == [-5.0, -6.0, -7.0]
    assert (made.versions, made.cached_tokens, made.extends) == (((4, 2), (5, 1)), 5, False)


def test_a_turn_that_sampled_nothing_is_still_a_turn() -> None:
    recorder = Recorder()
    recorder.prompt(array([1]))
    made = turn(recorder, [])
    assert (len(made.sampled_ids), len(made.logprobs), made.versions) == (0, 0, ())
