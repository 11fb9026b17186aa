"""Dense and paged histories against a plain computation over lists of keys and values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.cache.decoder_kv import (
    PAGE,
    DenseDecoderCache,
    MemoryBudget,
    PagedDecoderPool,
    bytes_per_token,
    pages,
)
from oasr_core.errors import CachePoolExhausted
from oasr_core.models.base import DecoderKV

SPEC = DecoderKV(layers=2, kv_heads=2, head_dim=4)
HEADS = 4
CPU = torch.device("cpu")


def pool(count=64):
    return PagedDecoderPool(SPEC, count, dtype=torch.float32, device=CPU)


def open_cache(storage, rows, shared=None, ceiling=64):
    if storage == "paged":
        return (shared or pool()).open([ceiling] * rows)
    return DenseDecoderCache(SPEC, rows, dtype=torch.float32, device=CPU)


class Textbook:
    """Every row's keys and values as lists, one a layer."""

    def __init__(self, rows):
        self.rows = [[([], []) for _ in range(SPEC.layers)] for _ in range(rows)]

    def attend(self, layer, query, key, value, valid):
        out = torch.zeros_like(query)
        for row, count in enumerate(valid):
            keys, values = self.rows[row][layer]
            for token in range(count):
                keys.append(key[row, token])
                values.append(value[row, token])
                stacked = torch.stack(keys).repeat_interleave(HEADS // SPEC.kv_heads, dim=1)
                scores = torch.einsum("hd,khd->hk", query[row, token], stacked) / math.sqrt(SPEC.head_dim)
                repeated = torch.stack(values).repeat_interleave(HEADS // SPEC.kv_heads, dim=1)
                out[row, token] = torch.einsum("hk,khd->hd", scores.softmax(-1), repeated)
        return out

    def drop(self, first, count):
        last = len(self.rows) - count
        self.rows[first : first + count] = self.rows[last:]
        del self.rows[last:]

    def copy(self, rows):
        self.rows = [[(list(k), list(v)) for k, v in self.rows[row]] for row in rows]


def step(cache, book, tokens, valid, generator):
    """One step of both; the outputs of real positions agree."""
    rows = len(cache.lengths)
    state = cache.begin(tokens, valid)
    expected_positions = [[length + i for i in range(tokens)] for length in cache.lengths]
    assert state.positions().tolist() == expected_positions
    for layer in range(SPEC.layers):
        query = torch.randn(rows, tokens, HEADS, SPEC.head_dim, generator=generator)
        key, value = torch.randn(2, rows, tokens, SPEC.kv_heads, SPEC.head_dim, generator=generator)
        got = state.attend(layer, query, key, value)
        want = book.attend(layer, query, key, value, valid)
        for row, count in enumerate(valid):
            torch.testing.assert_close(got[row, :count], want[row, :count], atol=1e-5, rtol=1e-5)
    cache.commit(state)
    assert cache.lengths == [len(row[0][0]) for row in book.rows]


@pytest.mark.parametrize("storage", ["dense", "paged"])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_history_is_what_was_appended_to_it(storage, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shared = pool()

    def opened():
        rows = data.draw(st.integers(1, 3))
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=rows, max_size=rows))
        cache, book = open_cache(storage, rows, shared), Textbook(rows)
        step(cache, book, max(lengths), lengths, generator)
        return cache, book

    cache, book = opened()
    for _ in range(data.draw(st.integers(1, 6))):
        rows = len(cache.lengths)
        action = data.draw(st.sampled_from(["step", "drop", "extend", "select"]))
        if action == "drop" and rows > 1:
            count = data.draw(st.integers(1, rows // 2))
            first = count * data.draw(st.integers(0, rows // count - 1)) if rows % count == 0 else rows - count
            cache.drop(first, count)
            book.drop(first, count)
        elif action == "extend" and rows < 6:
            other, other_book = opened()
            cache.extend(other)
            book.rows += other_book.rows
        elif action == "select":
            order = data.draw(st.permutations(range(rows)))
            if storage == "dense":
                order = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=2 * rows))
            cache.select(order)
            book.copy(order)
        else:
            step(cache, book, 1, [1] * rows, generator)
    step(cache, book, 1, [1] * len(cache.lengths), generator)
    cache.release()
    assert cache.lengths == []
    assert shared.blocks.num_free == shared.blocks.num_blocks


@pytest.mark.parametrize("storage", ["dense", "paged"])
def test_rows_that_hold_nan_harm_neither_neighbours_nor_successors(storage):
    generator = torch.Generator().manual_seed(1)
    shared = pool(6)
    tokens = 2 * PAGE + 1
    cache = shared.open([PAGE, 3 * PAGE]) if storage == "paged" else open_cache(storage, 2)
    poison = torch.tensor([math.nan, 1.0])[:, None, None, None]
    state = cache.begin(tokens, [3, tokens])
    query = torch.randn(2, tokens, HEADS, SPEC.head_dim, generator=generator)
    key, value = torch.randn(2, 2, tokens, SPEC.kv_heads, SPEC.head_dim, generator=generator)
    for layer in range(SPEC.layers):
        assert state.attend(layer, query, key * poison, value * poison)[1].isfinite().all()
    cache.commit(state)
    cache.drop(0, 1)  # the healthy row takes the place of the other
    fresh = open_cache(storage, 1, shared, PAGE)
    first = fresh.begin(1)
    for layer in range(SPEC.layers):
        fresh_out = first.attend(layer, query[:1, :1], key[1:, :1], value[1:, :1])
        assert fresh_out.isfinite().all()
    fresh.commit(first)
    cache.extend(fresh)
    state = cache.begin(1)
    for layer in range(SPEC.layers):
        assert state.attend(layer, query[:, :1], key[:, :1].nan_to_num(), value[:, :1]).isfinite().all()


def test_pages_are_reserved_up_to_the_ceiling_and_come_back():
    shared = pool(8)
    first = shared.open([PAGE, PAGE + 1])
    assert shared.blocks.num_free == 5
    with pytest.raises(CachePoolExhausted):
        shared.open([3 * PAGE, 3 * PAGE])
    assert shared.blocks.num_free == 5
    first.drop(1, 1)
    assert shared.blocks.num_free == 7
    second = shared.open([4 * PAGE])
    first.extend(second)
    second.release()
    assert shared.blocks.num_free == 3
    first.release()
    assert shared.blocks.num_free == 8


def test_pages_are_not_shared_between_rows():
    cache = pool().open([PAGE, PAGE])
    with pytest.raises(RuntimeError, match="beams are dense"):
        cache.select([0, 0])


def test_storages_do_not_mix():
    dense, paged, other = open_cache("dense", 1), open_cache("paged", 1), open_cache("paged", 1)
    for cache, stranger in ((dense, paged), (paged, dense), (paged, other)):
        with pytest.raises(TypeError, match="cannot take in"):
            cache.extend(stranger)


def test_a_paged_cache_outside_a_step_says_so():
    with pytest.raises(RuntimeError, match="outside a step"):
        open_cache("paged", 1).read(0, PAGE)


def test_a_budget_counts_what_is_set_aside():
    budget = MemoryBudget(100)
    assert budget.reserve("a", 60)
    assert not budget.reserve("b", 41)
    assert budget.reserve("b", 40)
    assert budget.used == 100
    budget.release("a")
    budget.release("a")
    assert budget.used == 40
    unlimited = MemoryBudget(None)
    assert unlimited.reserve("a", 10**18)
    assert unlimited.used == 10**18


def test_sizes():
    assert [pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
    assert bytes_per_token(SPEC, 2) == 2 * 2 * 2 * 4 * 2
