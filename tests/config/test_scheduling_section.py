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
