"""Where every token went."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.accounting import Account
from paceline.errors import InvariantError

FATES = ("shipped", "zero_signal", "stale", "failed", "cancelled", "truncated")


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from((None, "grouped", *FATES))), max_size=40))
def test_what_is_sampled_is_in_exactly_one_place_through_a_save_and_a_resumption(
    rollouts: list[tuple[int, str | None]],
) -> None:
    account = Account()
    stream = account.of("train", "env")
    under_way = 0
    for tokens, fate in rollouts:
        account.launched(stream)
        account.sampled(stream, tokens)
        if fate is None:
            under_way += tokens
        elif fate == "grouped":
            stream.move("in_flight", "grouped", tokens)
            under_way += tokens
        else:
            stream.move("in_flight", "grouped", tokens)
            stream.move("grouped", fate, tokens)  # type: ignore[arg-type]
        account.check()
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(account.snapshot()))
    resumed = Account()
    resumed.restore(rows)
    resumed.check()
    after = resumed.of("train", "env")
    assert (after.launched, after.sampled) == (len(rollouts), stream.sampled)
    assert (after.tokens, after.rollouts) == (stream.tokens, stream.rollouts)
    resumed.give_up()
    resumed.check()
    assert after.tokens.get("cancelled", 0) == stream.tokens.get("cancelled", 0) + under_way


def test_a_cut_off_tail_moves_without_its_rollout() -> None:
    account = Account()
    stream = account.of("train", "env")
    account.launched(stream)
    account.sampled(stream, 10)
    stream.move("in_flight", "queued", 10)
    stream.move("queued", "overlong", 3, rollouts=0)
    account.check()
    assert (stream.tokens["queued"], stream.tokens["overlong"], stream.rollouts["overlong"]) == (7, 3, 0)


@pytest.mark.parametrize("lost", ["tokens", "rollouts", "negative"])
def test_a_difference_is_found_and_names_the_environment_and_the_numbers(lost: str) -> None:
    account = Account()
    stream = account.of("eval", "held")
    account.launched(stream)
    account.sampled(stream, 5)
    if lost == "tokens":
        stream.tokens["in_flight"] = 4
    elif lost == "rollouts":
        stream.rollouts["in_flight"] = 0
    else:
        stream.move("queued" if stream.tokens.setdefault("queued", 0) else "in_flight", "shipped", 9)
    with pytest.raises(InvariantError, match="eval env 'held'"):
        account.check()
