"""The free list."""

from __future__ import annotations

import pytest

from oasr_core.cache.block_pool import BlockPool
from oasr_core.errors import CachePoolExhausted


def test_home_blocks_are_given_where_free():
    pool = BlockPool(6)
    assert pool.allocate([3, 1]) == [3, 1]
    assert pool.allocate([3]) == [0]
    assert pool.num_free == 3


def test_exhaustion_is_all_or_none_and_a_runtime_error():
    pool = BlockPool(3)
    pool.allocate([-1, -1])
    with pytest.raises(CachePoolExhausted, match="2 blocks wanted, 1 of 3 free") as caught:
        pool.allocate([-1, -1])
    assert isinstance(caught.value, RuntimeError)
    assert pool.num_free == 1
    assert not pool.can_allocate(2)


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(2)
    (block,) = pool.allocate([-1])
    pool.free([block])
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free([block])
