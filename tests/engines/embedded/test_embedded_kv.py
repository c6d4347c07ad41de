from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="needs the train extra")
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.embedded.kv import BlockPool, extend_hashes, prefix_root
from paceline.errors import InvariantError

pytestmark = pytest.mark.torch


def hashes_of(ids: list[int], *, epoch: int = 0, salt: str | None = None, size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, prefix_root(epoch, salt), ids, size, len(ids))
    return hashes


def test_a_block_hash_stands_for_everything_before_it() -> None:
    assert hashes_of([1, 2, 3, 4]) == hashes_of([1, 2, 3, 4, 5])
    assert hashes_of([9, 2, 3, 4])[1] != hashes_of([1, 2, 3, 4])[1]


def test_other_weights_or_another_salt_never_share_a_hash() -> None:
    roots = [hashes_of([1, 2], epoch=e, salt=s)[0] for e in (0, 1, 11) for s in (None, "a", "1:a")]
    assert len(set(roots)) == len(roots)


def test_hashes_grow_in_pieces_as_they_would_at_once() -> None:
    grown: list[bytes] = []
    for upto in (1, 3, 6, 7):
        extend_hashes(grown, prefix_root(0, None), [5, 6, 7, 8, 9, 10, 11], 2, upto)
    assert grown == hashes_of([5, 6, 7, 8, 9, 10])


def test_a_take_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(2) is not None
    assert pool.take(2) is None
    assert pool.available == 1


def test_idle_blocks_are_found_again_and_evicted_oldest_first_but_prefixes_last() -> None:
    pool, keys = BlockPool(3), hashes_of([1, 2, 3, 4])
    blocks = pool.take(2) or []
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.match(keys) == blocks
    pool.take(2)  # the third block, then the one at the end of the prefix
    assert pool.match(keys) == blocks[:1]


def test_a_matched_block_is_not_evicted_to_make_room_for_the_rest_of_its_own_sequence() -> None:
    pool, keys = BlockPool(2), hashes_of([1, 2])
    first = pool.take(1) or []
    pool.publish(first[0], keys[0])
    pool.release(first)
    assert pool.take(2, pool.match(keys)) is None
    assert pool.take(1, pool.match(keys)) == [first[0], 2 if first[0] == 1 else 1]


def test_releasing_twice_is_our_own_fault_and_says_so() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1) or []
    pool.release(blocks)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(blocks)


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_no_block_is_lost_or_shared_unasked_over_any_sequence_of_operations(size: int, seed: int) -> None:
    """Sequences over a tiny alphabet, so that prefixes really repeat; now and then all hashes are forgotten."""
    draw, pool, epoch = random.Random(seed), BlockPool(size), 0
    holders: list[tuple[list[int], list[bytes], int]] = []
    for _ in range(60):
        what = draw.random()
        if what < 0.5:
            ids = [draw.randrange(2) for _ in range(2 * draw.randint(1, 4))]
            keys = hashes_of(ids, epoch=epoch)
            matched = pool.match(keys)
            before = pool.available
            blocks = pool.take(len(keys) - len(matched), matched)
            if blocks is None:
                assert pool.available == before
                continue
            assert blocks[: len(matched)] == matched
            assert len(set(blocks)) == len(blocks)
            assert 0 not in blocks
            fresh = set(blocks[len(matched) :])
            assert not fresh & {block for held, _keys, _epoch in holders for block in held}
            for block, key in zip(blocks, keys, strict=True):
                pool.publish(block, key)
            holders.append((blocks, keys, epoch))
        elif what < 0.9 and holders:
            blocks, _keys, _epoch = holders.pop(draw.randrange(len(holders)))
            pool.release(blocks)
        elif what > 0.95:
            pool.forget_all()
            epoch += 1
        held = {block for blocks, _keys, _epoch in holders for block in blocks}
        assert pool.referenced == len(held)
        for _blocks, keys, made in holders:
            if made == epoch:
                assert len(pool.match(keys)) == len(keys)
            else:
                assert pool.match(keys) == []
    for blocks, _keys, _epoch in holders:
        pool.release(blocks)
    assert pool.available == size
    assert len(pool.take(size) or []) == size
