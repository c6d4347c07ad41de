"""`[scheduling]`: which policy a config names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.core.scheduling import (
    Divided,
    KvArea,
    Overlap,
    Overprovision,
    Partial,
    Repeating,
    Scheduling,
    Synchronous,
    TailRounds,
    UnbiasedTail,
    scheduling_of,
)


def config(scheduling: dict[str, Any], **more: Any) -> RunConfig:
    whole = {"model": {"name": "m"}, "env": [{"id": "arithmetic"}], "algorithm": {"name": "rloo"}, **more}
    return RunConfig.model_validate(whole | {"scheduling": scheduling})


@pytest.mark.parametrize(
    ("section", "kind", "bound"),
    [
        ({"type": "overlap"}, Overlap, 4),
        ({"type": "synchronous"}, Synchronous, 0),
        ({"type": "overprovision"}, Overprovision, 4),
        ({"type": "overprovision", "late": "discard"}, Overprovision, 0),
        ({"type": "partial", "budget_tokens": 64}, Partial, 8),
        ({"type": "tail_rounds"}, TailRounds, 0),
        ({"type": "divided"}, Divided, 4),
        ({"type": "unbiased_tail"}, UnbiasedTail, 0),
        ({"type": "unbiased_tail", "late": "resume"}, UnbiasedTail, 32),
        ({"type": "kv_area"}, KvArea, 4),
    ],
)
def test_each_policy_is_named_by_its_type(
    section: dict[str, Any], kind: type[Scheduling], bound: int
) -> None:
    found = config(section)
    assert type(scheduling_of(found)) is kind
    assert found.staleness_bound == bound


def test_late_ones_are_resumed_where_the_engine_does_not_pin_noise() -> None:
    assert config({"type": "unbiased_tail"}).late == "pinned"
    vllm = {"type": "vllm", "urls": ["http://localhost:8000"]}
    assert config({"type": "unbiased_tail"}, engine=vllm).late == "resume"
    assert config({"type": "unbiased_tail"}, engine=vllm).staleness_bound == 32


@pytest.mark.parametrize(
    ("section", "more", "words"),
    [
        ({"type": "unbiased_tail"}, {"algorithm": {"name": "grpo"}}, ("grpo", "rloo")),
        (
            {"type": "unbiased_tail", "late": "pinned"},
            {"engine": {"type": "vllm", "urls": ["http://localhost:8000"]}},
            ("pinned", "resume"),
        ),
        (
            {"type": "unbiased_tail"},
            {"env": [{"id": "arithmetic", "all_or_nothing": True}]},
            ("all_or_nothing", "scheduling.type"),
        ),
        ({"type": "partial"}, {}, ("budget_tokens", "over_issue")),
        (
            {"type": "partial", "budget_tokens": 2, "max_staleness": 3},
            {"sampling": {"max_tokens": 64}},
            ("64", "max_staleness is 3"),
        ),
        ({"type": "divided", "lag": 5}, {}, ("max_staleness 4", "lag 5")),
    ],
)
def test_a_policy_that_cannot_work_is_refused_with_what_to_change(
    section: dict[str, Any], more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as refused:
        config(section, **more)
    for word in words:
        assert word in str(refused.value)


def test_a_run_that_is_to_repeat_has_the_policy_that_does() -> None:
    found = config({"type": "synchronous"}, run={"deterministic": True})
    assert type(scheduling_of(found)) is Repeating
    assert found.staleness_bound == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"engine": {"type": "vllm", "urls": ["http://localhost:8000"]}},
            ("'vllm'", 'engine.type = "embedded"', "paceline replay RUN --batches"),
        ),
        ({"engine": {"type": "embedded", "dtype": "bfloat16"}}, ("engine.dtype", "'bfloat16'", '"float32"')),
        ({"scheduling": {"type": "overlap"}}, ("'overlap'", 'scheduling.type = "synchronous"')),
        (
            {"admission": {"type": "adaptive", "park": False}},
            ("admission.park is false", "admission.park = true"),
        ),
    ],
)
def test_what_cannot_repeat_is_refused_with_what_to_change(
    more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**{"scheduling": {"type": "synchronous"}, "run": {"deterministic": True}, **more})
    for word in words:
        assert word in str(refused.value)
