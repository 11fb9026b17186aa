"""StreamStateStore: paged against dense, rings, eviction, recycling, slots, and the return of everything."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from oasr_core.cache.attention import PagedAttentionCache
from oasr_core.cache.options import CacheOptions
from oasr_core.cache.sizing import build_cache_config
from oasr_core.cache.store import StreamStateStore
from oasr_core.models.base import PagedKV, Slot

CPU = torch.device("cpu")
HEADS, DIM, LAYERS = 2, 8, 2


def make_store(*, paged=True, left=-1, chunk=4, block=4, streams=4, key_bias=True, window=None, prefilled=False, **kw):
    spec = PagedKV(LAYERS, HEADS, DIM, key_bias=key_bias, window=window, prefilled=prefilled)
    options = CacheOptions(block_size_frames=block, use_paged_cache=paged, **kw)
    config = build_cache_config(
        spec, options, chunk_size=chunk, num_left_chunks=left, max_streams=streams, element_size=4
    )
    slots = [Slot("conv", (LAYERS, 3, DIM), slot_axis=1, init=0.5), Slot("count", (1,))]
    return StreamStateStore(config, slots, max_streams=streams, dtype=torch.float32, device=CPU, paged=paged)


def drive(store, plan, *, chunk=4, key_bias=True, seed=0, score_bias=False):
    """Run cohorts ``[(stream, count), ...]`` per step with random tensors; returns the outputs' valid parts by
    stream.
    """
    offsets: dict[str, int] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    for step in plan:
        for stream, _ in step:
            if stream not in offsets:
                store.allocate(stream)
                offsets[stream] = 0
        names = [stream for stream, _ in step]
        counts = np.array([count for _, count in step])
        cohort = store.cohort(names, np.array([offsets[n] for n in names]), counts, chunk)
        for layer in range(LAYERS):
            parts = {n: [] for n in "qkvb"}
            for stream in names:  # a stream's tensors depend on the stream and its age alone
                own = torch.Generator().manual_seed(zlib.crc32(f"{stream}/{offsets[stream]}/{layer}/{seed}".encode()))
                for n in "qkv":
                    parts[n].append(torch.randn(chunk, HEADS, DIM, generator=own))
                parts["b"].append(torch.randn(chunk, HEADS, generator=own))
            q, k, v, b = (torch.stack(parts[n]) for n in "qkvb")
            extra = None
            if score_bias:
                positions = cohort.key_positions()
                extra = (positions.float() * 0.01)[:, None, None].expand(-1, HEADS, chunk, -1)
            out = cohort.attend(layer, q, k, v, key_bias=b if key_bias else None, score_bias=extra)
            for i, stream in enumerate(names):
                outputs.setdefault(stream, []).append(out[i, : counts[i]].clone())
        for stream, count in step:
            offsets[stream] += count
    return {stream: torch.cat(parts) for stream, parts in outputs.items()}


MIXED = [
    [("a", 4)],
    [("a", 4), ("b", 4)],
    [("b", 4), ("a", 4), ("c", 4)],
    [("c", 4), ("a", 4)],
    [("a", 4), ("b", 4), ("c", 4)],
    [("a", 2), ("b", 4), ("c", 1)],
]


@pytest.mark.parametrize("left", [-1, 0, 1, 3])
@pytest.mark.parametrize("key_bias", [True, False])
@pytest.mark.parametrize("block", [4, 6])
def test_paged_equals_dense(left, key_bias, block):
    want = drive(make_store(paged=False, left=left, key_bias=key_bias, block=block), MIXED, key_bias=key_bias)
    got = drive(make_store(left=left, key_bias=key_bias, block=block), MIXED, key_bias=key_bias)
    for stream, value in want.items():
        torch.testing.assert_close(got[stream], value, atol=1e-6, rtol=1e-5)


def test_cohorts_equal_streams_alone():
    together = drive(make_store(left=2), MIXED)
    for stream in "abc":
        alone = drive(make_store(left=2), [[(s, n)] for step in MIXED for s, n in step if s == stream])
        torch.testing.assert_close(together[stream], alone[stream], atol=1e-6, rtol=1e-5)


def test_a_fragmented_table_is_gathered_and_equal():
    want = drive(make_store(), MIXED)
    store = make_store()
    assert isinstance(store.attention, PagedAttentionCache)
    taken = store.attention.pool.allocate([0, 2, 513, 1024])  # other streams' homes: their blocks land elsewhere
    got = drive(store, MIXED)
    for stream, value in want.items():
        torch.testing.assert_close(got[stream], value, atol=1e-6, rtol=1e-5)
    store.attention.pool.free(taken)


def test_score_bias_follows_key_positions():
    for left in (-1, 1):
        want = drive(make_store(paged=False, left=left), [[(s, n)] for step in MIXED for s, n in step], score_bias=True)
        got = drive(make_store(left=left), MIXED, score_bias=True)
        for stream, value in want.items():
            torch.testing.assert_close(got[stream], value, atol=1e-6, rtol=1e-5)


def test_recycling_drops_whole_blocks_and_goes_on():
    plan = [[("a", 4)]] * 12
    got = drive(make_store(max_num_blocks=12, recycle_streaming_history=True), plan)  # 3 blocks a stream
    want = drive(make_store(paged=False, max_num_blocks=12, recycle_streaming_history=True), plan)
    torch.testing.assert_close(got["a"], want["a"], atol=1e-6, rtol=1e-5)
    free = drive(make_store(), plan)
    assert torch.allclose(got["a"][:24], free["a"][:24], atol=1e-6)  # until the ring is full nothing differs
    assert not torch.allclose(got["a"][-4:], free["a"][-4:], atol=1e-3)


def test_prefilled_window_is_visible_history():
    kw = {"window": 8, "prefilled": True, "key_bias": False}
    got = drive(make_store(**kw), MIXED, key_bias=False)
    want = drive(make_store(paged=False, **kw), MIXED, key_bias=False)
    for stream, value in want.items():
        torch.testing.assert_close(got[stream], value, atol=1e-6, rtol=1e-5)
    store = make_store(**kw)
    store.allocate("x")
    cohort = store.cohort(["x"], np.array([0]), np.array([4]), 4)
    assert cohort.key_positions().min() == -8 or (cohort.key_positions() >= -8).all()
    zero = torch.zeros(1, 4, HEADS, DIM)
    seen = cohort.attend(0, zero, zero, torch.ones(1, 4, HEADS, DIM))
    torch.testing.assert_close(seen, torch.full_like(seen, 4 / 12))  # eight zero frames and four ones


def test_capacity_is_asked_before_dispatch():
    store = make_store(max_num_blocks=8)  # 2 blocks of 4 frames a stream
    assert not store.at_capacity(4, 4)
    assert store.at_capacity(5, 4)
    assert not make_store(max_num_blocks=8, recycle_streaming_history=True).at_capacity(500, 4)
    assert not make_store(left=2).at_capacity(10_000, 4)


def test_everything_returns():
    store = make_store(left=2)
    before = store.free_blocks
    drive(store, MIXED)
    assert store.num_streams == 3
    assert store.free_blocks is not None
    assert store.free_blocks < before
    for stream in "abc":
        store.free(stream)
    assert store.free_blocks == before
    assert store.num_streams == 0


def test_unread_history_stays_finite_after_a_stream_of_nan():
    """A freed block that held NaN must not poison the next stream, also where it is read only under a mask."""
    store = make_store(streams=2)
    store.allocate("bad")
    nan = torch.full((1, 4, HEADS, DIM), float("nan"))
    for step in range(3):
        store.cohort(["bad"], np.array([4 * step]), np.array([4]), 4).attend(0, nan, nan, nan, key_bias=nan[..., 0])
    store.free("bad")
    plan = [[("a", 2), ("b", 4)], [("b", 4)], [("b", 4), ("a", 1)]]
    got = drive(store, plan)
    want = drive(make_store(streams=2), plan)
    for stream in "ab":
        assert torch.isfinite(got[stream]).all()
        torch.testing.assert_close(got[stream], want[stream])


def test_slots_begin_at_their_initial_value_and_keep_to_their_row():
    store = make_store()
    for name in "abc":
        store.allocate(name)
    cohort = store.cohort(["a", "c"], np.array([0, 0]), np.array([4, 4]), 4)
    assert (cohort.read("conv", 1) == 0.5).all()
    cohort.write("conv", torch.stack([torch.full((3, DIM), 1.0), torch.full((3, DIM), 3.0)]), 1)
    both = store.cohort(["a", "b", "c"], np.array([0, 0, 0]), np.array([4, 4, 4]), 4)
    assert both.read("conv", 1)[:, 0, 0].tolist() == [1.0, 0.5, 3.0]
    assert (both.read("conv", 0) == 0.5).all()
    assert both.read("conv").shape == (3, LAYERS, 3, DIM)
    store.free("a")
    store.allocate("d")
    assert (store.cohort(["d"], np.array([0]), np.array([4]), 4).read("conv") == 0.5).all()


def test_errors_name_the_stream():
    store = make_store()
    store.allocate("a")
    with pytest.raises(ValueError, match="'a' already has a state"):
        store.allocate("a")
    with pytest.raises(KeyError, match="stream 'b' has no state"):
        store.free("b")
    cohort = store.cohort(["a"], np.array([0]), np.array([4]), 4)
    with pytest.raises(KeyError, match="slot 'cnn' is not declared; declared: conv, count"):
        cohort.read("cnn")


def test_a_large_pool_commits_no_memory_until_it_is_used():
    """Two GiB are reserved; resident memory grows by what a stream touches."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    spec = PagedKV(layers=4, kv_heads=8, head_dim=64)
    config = build_cache_config(spec, CacheOptions(), chunk_size=16, num_left_chunks=-1, max_streams=16, element_size=4)
    before = resident()
    store = StreamStateStore(config, [], max_streams=16, dtype=torch.float32, device=CPU)
    assert store.bytes > 2 * 2**30
    assert resident() - before < 64 * 2**20
    store.allocate("a")
    tensor = torch.ones(1, 16, 8, 64)
    for layer in range(4):
        store.cohort(["a"], np.array([0]), np.array([16]), 16).attend(layer, tensor, tensor, tensor)
    assert resident() - before < 64 * 2**20
