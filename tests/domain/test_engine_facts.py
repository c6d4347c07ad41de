"""What an engine says about itself has to be something that a journal can hold."""

from __future__ import annotations

import pytest

from paceline.domain.load import EngineInfo, EngineLoad
from paceline.errors import EngineError

MOST = 2**63 - 1


@pytest.mark.parametrize("field", ["kv_tokens", "max_model_len"])
def test_an_engine_of_more_tokens_than_a_journal_can_hold_is_refused_by_name(field: str) -> None:
    facts: dict[str, int | None] = {"kv_tokens": None, "max_model_len": None}
    assert getattr(EngineInfo("e0", **facts | {field: MOST}), field) == MOST
    with pytest.raises(EngineError, match=f"engine e0 says .* of {MOST + 1} tokens, above {MOST}"):
        EngineInfo("e0", **facts | {field: MOST + 1})


def test_a_reading_with_a_count_that_a_journal_cannot_hold_is_none() -> None:
    assert EngineLoad(1, 2, 0.5, 0, generated_tokens=MOST).generated_tokens == MOST
    with pytest.raises(EngineError, match=f"a count of {10**20}, above {MOST}"):
        EngineLoad(1, 2, 0.5, 0, generated_tokens=10**20)
