"""The in-flight ledger and its index by oldest version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.accounting import StreamAccount
from paceline.core.flights import Flight, Flights
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError


def flight(number: int, split: str = "train") -> Flight:
    task = TaskRef("env", "eval" if split == "eval" else "train", number)
    return Flight(RolloutId(number, 0), task, "e0", 0.0, StreamAccount(), 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["add", "remove", "sample"]), st.integers(0, 6)))
)
def test_the_index_finds_exactly_the_flights_that_are_older(steps: list[tuple[int, str, int]]) -> None:
    flights, model = Flights(), dict[int, int | None]()
    for number, what, version in steps:
        if what == "add" and number not in model:
            flights.add(flight(number, "eval" if number >= 8 else "train"))
            model[number] = None
        elif what == "remove" and number in model:
            flights.remove(RolloutId(number, 0))
            del model[number]
        elif what == "sample" and number in model:
            flights.sampled_since(flights[RolloutId(number, 0)], version)
            model[number] = None if number >= 8 else version
        for bound in (0, 3, 7):
            old = {f.id.group for f in flights.older_than(bound)}
            assert old == {n for n, v in model.items() if v is not None and v < bound}
        assert flights.oldest() == min((v for v in model.values() if v is not None), default=None)
        assert (flights.trains, flights.evals) == (sum(n < 8 for n in model), sum(n >= 8 for n in model))
        assert len(flights) == len(model)


def test_one_that_is_being_cancelled_is_not_found_again() -> None:
    flights = Flights()
    for number in range(2):
        flights.add(flight(number))
        flights.sampled_since(flights[RolloutId(number, 0)], 1)
    flights[RolloutId(0, 0)].cancelled = "stale"
    assert [f.id.group for f in flights.older_than(2)] == [1]


def test_what_is_not_in_flight_is_named() -> None:
    flights = Flights()
    flights.add(flight(1))
    with pytest.raises(InvariantError, match=r"g1\.m0\.a0 is in flight already"):
        flights.add(flight(1))
    flights.remove(RolloutId(1, 0))
    with pytest.raises(InvariantError, match=r"g1\.m0\.a0 is not in flight"):
        flights.remove(RolloutId(1, 0))
