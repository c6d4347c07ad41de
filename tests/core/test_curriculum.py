"""Which environment next, and which of its tasks."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.curriculum import Curriculum, Source
from paceline.domain.task import TaskRef

sources = st.lists(
    st.builds(
        lambda n, size, weight, epochs, sampler: Source(
            f"env{n}", size, weight, sampler, epochs, f"print{n}"
        ),
        st.integers(0, 9),
        st.sampled_from([None, 1, 5, 12]),
        st.sampled_from([0.5, 1.0, 4.0]),
        st.sampled_from([None, 1, 3]),
        st.sampled_from(["shuffled", "sequential"]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda source: source.env,
)


def drawn(curriculum: Curriculum, count: int) -> list[TaskRef]:
    tasks = (curriculum.draw(lambda _env: True) for _ in range(count))
    return [task for task in tasks if task is not None]


@given(sources, st.integers(0, 99), st.integers(0, 60))
def test_every_epoch_holds_every_task_once_and_a_finite_source_ends(
    made_of: list[Source], seed: int, count: int
) -> None:
    curriculum = Curriculum(made_of, seed)
    tasks = drawn(curriculum, count)
    for source in made_of:
        mine = [task for task in tasks if task.env == source.env]
        assert len({(task.index, task.epoch) for task in mine}) == len(mine)
        if source.size is None:
            assert [task.index for task in mine] == list(range(len(mine)))
            continue
        whole = len(mine) // source.size
        for epoch in range(whole):
            of_epoch = [task.index for task in mine if task.epoch == epoch]
            assert sorted(of_epoch) == list(range(source.size))
        if source.epochs is not None:
            assert len(mine) <= source.size * source.epochs
    if len(tasks) < count:
        assert curriculum.exhausted
        assert curriculum.draw(lambda _env: True) is None


@given(sources, st.integers(0, 99), st.integers(0, 30), st.integers(0, 8))
def test_a_resumed_curriculum_draws_the_unfinished_and_then_what_an_uninterrupted_one_draws(
    made_of: list[Source], seed: int, before: int, unfinished: int
) -> None:
    whole = Curriculum(made_of, seed)
    first = drawn(whole, before)
    pending = first[max(0, before - unfinished) :]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(whole.snapshot(pending)))
    resumed = Curriculum(made_of, seed)
    assert resumed.restore(state) == []
    again = drawn(resumed, len(pending))
    assert Counter(again) == Counter(pending)
    assert drawn(resumed, 20) == drawn(whole, 20)


def test_environments_are_drawn_by_weight() -> None:
    curriculum = Curriculum([Source("a", None, 3.0), Source("b", None, 1.0)], seed=7)
    counts = Counter(task.env for task in drawn(curriculum, 4000))
    assert 0.72 < counts["a"] / 4000 < 0.78


def test_an_environment_that_may_not_start_passes_its_turn_on() -> None:
    curriculum = Curriculum([Source("a", None), Source("b", None)], seed=7)
    tasks = [curriculum.draw(lambda env: env == "b") for _ in range(20)]
    assert [task.index for task in tasks if task] == list(range(20))
    assert curriculum.draw(lambda _env: False) is None
    assert curriculum.samplers["a"].drawn == 0


def test_a_mix_draws_the_same_whatever_the_orders_of_its_environments() -> None:
    plain, shuffled = (
        [t.env for t in drawn(Curriculum([Source("a", 9, sampler=s), Source("b", None)], seed=3), 50)]
        for s in ("sequential", "shuffled")
    )
    assert plain == shuffled


def test_a_task_that_is_at_rest_when_it_is_to_be_drawn_again_costs_no_draw() -> None:
    curriculum = Curriculum([Source("e", 4, sampler="sequential", epochs=1)], 0)
    first = drawn(curriculum, 4)
    state = curriculum.snapshot(first[:2])
    resumed = Curriculum([Source("e", 4, sampler="sequential", epochs=1)], 0)
    resumed.restore(state)
    sampler = resumed.samplers["e"]
    sampler.resting = {0: 100}
    assert drawn(resumed, 1) == [first[1]]
    assert resumed.skipped == [first[0]]
    assert resumed.exhausted
    after = resumed.snapshot()
    assert (after["draws"], after["envs"]["e"]["drawn"]) == (4, 4)
