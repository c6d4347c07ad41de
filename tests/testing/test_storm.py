"""Random faults and kills: what holds over all lives of a run, and that the harness sees it when it does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from paceline.core.batching import BatchList
from paceline.core.fleet import EngineState
from paceline.core.parts import whole_parts
from paceline.core.recovery import Recovery
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.part import Part
from paceline.testing import storm

LOTS = 25


@pytest.mark.parametrize("lot", range(LOTS))
def test_nothing_is_lost_or_trained_twice_whatever_fails_and_whenever_it_is_killed(lot: int) -> None:
    for seed in range(20 * lot, 20 * lot + 20):
        try:
            storm.run_seed(seed, 60)
        except Exception as error:
            again = f"python -m paceline.testing.storm --first {seed} --seeds 1 --events 60"
            raise AssertionError(f"seed {seed}: {error}; again: {again}") from error


def keeps_what_is_cut(recovery: Recovery, command: do.ShipBatch) -> None:
    before = dict(recovery._list)
    SHIP(recovery, command)
    recovery._list = before


def forgets_a_permit(engine: EngineState, flight: Any) -> None:
    del engine.flights[flight.id]
    engine.working_tokens -= 0 if flight.parked else flight.context


def sweeps_too_late(batch_list: BatchList, step: int, bound: int, on_stale: Any) -> list[Any]:
    return []


def loses_retries(recovery: Recovery, rollout: Any, again: bool) -> None:
    recovery._handlers[do.NoteRetry] = lambda command: None
    ENDED(recovery, rollout, False)


def keeps_what_is_lost(recovery: Recovery, event: on.RolloutContinued) -> None:
    flight = recovery._flights[event.rollout]
    flight.oldest = event.oldest


def takes_every_part(parts: Iterable[Part], requests: int) -> tuple[Part, ...]:
    return whole_parts(parts, 10**9)


ENDED, SHIP = Recovery._ended, Recovery._ship

MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "a batch that was cut still waits after a kill": (Recovery, "_ship", keeps_what_is_cut),
    "a failed attempt counts as the last one after a kill": (Recovery, "_ended", loses_retries),
    "the permit of a rollout is never given back": (EngineState, "remove", forgets_a_permit),
    "what grew stale is not swept": (BatchList, "sweep", sweeps_too_late),
    "what was commanded and not answered is forgotten": (Recovery, "owed", lambda *_: []),
    "tokens that a rollout lost at a restart stay with it after the next": (
        Recovery,
        "_continued",
        keeps_what_is_lost,
    ),
    "a rollout goes on with tokens that the journal does not know of": (
        storm,
        "whole_parts",
        takes_every_part,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_planted_fault_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, changed = MUTATIONS[mutation]
    monkeypatch.setattr(place, name, changed)
    for seed in range(24):
        try:
            storm.run_seed(seed, 200)
        except Exception:
            return
    raise AssertionError(f"{mutation}: not one of 24 seeds found it")
