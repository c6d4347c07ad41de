"""The warning of dead groups: long before the run ends, with the environment, why, and what to change."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.batching import DeadStreak
from paceline.domain.commands import NoteDead
from paceline.domain.group import Fate, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.errors import NoProgressError


def group(fate: Fate, reason: str = "", mean: float | None = None, variance: float = 0.0) -> GroupResult:
    verdicts = tuple(Verdict(RolloutId(0, n), fate, reason) for n in range(2))
    dead = None if fate == "queued" else fate
    return GroupResult(0, verdicts, mean, None if mean is None else variance, dead)


def warnings(streak: DeadStreak, env: str, result: GroupResult, times: int) -> list[NoteDead]:
    return [note for _ in range(times) if (note := streak.add(result, env)) is not None]


def test_a_streak_is_told_early_and_whenever_it_has_doubled() -> None:
    told = warnings(DeadStreak(512), "a", group("zero_signal", mean=1.0), 512)
    assert [note.groups for note in told] == [32, 64, 128, 256, 512]
    assert "the run ends after 512 (batch.dead_group_limit)" in told[0].reason
    told = warnings(DeadStreak(6), "a", group("zero_signal", mean=1.0), 6)
    assert [note.groups for note in told] == [2, 4]


@pytest.mark.parametrize(
    ("result", "why", "advice"),
    [
        (group("zero_signal", mean=0.25), "all rewards of a group were equal (0.25)", "partial rewards"),
        (group("zero_signal", "no advantage beyond 3", 0.25, 0.1), "no advantage beyond 3", "group_size"),
        (group("failed", "environment: ValueError: boom (e.py:3)"), "ValueError: boom (e.py:3)", "mend"),
        (group("filtered", "repetition: 9 in a row"), "filtered: repetition", "enforce = false"),
        (
            group("overlong", "the prompt has 90 tokens, batch.seq_len is 64"),
            "the prompt has 90 tokens, batch.seq_len is 64",
            "raise batch.seq_len",
        ),
        (group("truncated", "turns: not scored"), "turns: not scored", "on_truncated"),
        (group("void", "all-or-nothing: 1 of 2"), "all-or-nothing", "all_or_nothing"),
    ],
)
def test_each_death_is_told_with_its_environment_its_cause_and_a_remedy(
    result: GroupResult, why: str, advice: str
) -> None:
    streak = DeadStreak(6)
    [first, _] = warnings(streak, "mine", result, 6)
    with pytest.raises(NoProgressError) as end:
        streak.add(result, "mine")
    for text in (first.reason, str(end.value)):
        assert "env 'mine'" in text
        assert why in text
        assert advice in text


def test_an_environment_that_never_trains_is_told_although_the_others_do() -> None:
    streak = DeadStreak(16)
    told: list[NoteDead] = []
    for _ in range(4):
        told += warnings(streak, "dead", group("zero_signal", mean=0.0), 1)
        told += warnings(streak, "alive", group("queued", mean=0.5, variance=0.2), 1)
    assert [(note.env, note.groups) for note in told] == [("dead", 2), ("dead", 4)]
    assert "the run ends" not in told[0].reason
    assert warnings(streak, "dead", group("queued", mean=0.5), 2) == [
        NoteDead("dead", 0, "a group of it trains again")
    ]


def test_a_page_of_error_text_is_cut() -> None:
    streak = DeadStreak(6)
    [first, _] = warnings(streak, "a", group("failed", "environment: " + "x" * 5000), 4)
    assert len(first.reason) < 1000
    assert msgspec.json.encode(first)
