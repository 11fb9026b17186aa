"""Geometry rules, and the bytes formula against the real allocation."""

from __future__ import annotations

import logging

import pytest
import torch

from oasr_core.cache.attention import PagedAttentionCache
from oasr_core.cache.options import CacheOptions
from oasr_core.cache.sizing import available_on_cuda, build_cache_config
from oasr_core.errors import CacheGeometryError, ConfigError
from oasr_core.models.base import PagedKV

SPEC = PagedKV(layers=2, kv_heads=4, head_dim=8, key_bias=True)


def build(spec: PagedKV = SPEC, *, chunk=16, left=-1, streams=4, available=None, element=4, **options):
    return build_cache_config(
        spec,
        CacheOptions(**options),
        chunk_size=chunk,
        num_left_chunks=left,
        max_streams=streams,
        element_size=element,
        available_bytes=available,
    )


def test_the_ceiling_without_anything_to_measure():
    config = build()
    assert config.num_blocks == 4 * 512
    assert config.capacity_frames == 512 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_bias", [True, False])
def test_bytes_formula_is_the_real_allocation(dtype, key_bias):
    spec = PagedKV(layers=3, kv_heads=2, head_dim=8, key_bias=key_bias)
    config = build(spec, max_num_blocks=12, element=dtype.itemsize)
    cache = PagedAttentionCache(config, dtype, torch.device("cpu"))
    assert cache.bytes == config.pool_bytes


def test_the_manuals_default_conformer_block():
    """12 layers, 4 heads of 64, 16 frames, fp16: 192 KiB a block and 384 MiB for 2048 blocks (CACHE-06)."""
    spec = PagedKV(layers=12, kv_heads=4, head_dim=64)
    config = build(spec, element=2, max_num_blocks=2048, streams=32)
    assert config.bytes_per_block == 192 * 1024
    assert config.num_blocks * config.bytes_per_block == 384 * 2**20


def test_an_explicit_pool_caps_each_stream_at_its_share():
    config = build(max_num_blocks=2048, streams=32)
    assert config.blocks_per_seq == 64
    assert config.capacity_frames == 1024  # about 41 s at 40 ms


def test_block_follows_chunk_unless_set():
    assert build(chunk=32).block_frames == 32
    assert build(chunk=8, block_size_frames=16).block_frames == 16


def test_chunk_larger_than_block_is_refused():
    with pytest.raises(CacheGeometryError, match=r"chunk_size=32 is larger than block_size_frames=16") as caught:
        build(chunk=32, block_size_frames=16)
    assert isinstance(caught.value, ConfigError)


def test_table_narrower_than_the_window_is_refused():
    with pytest.raises(CacheGeometryError, match="max_blocks_per_seq=4 is less than the 5 blocks"):
        build(left=4, max_blocks_per_seq=4)


def test_bounded_pool_must_cover_every_stream():
    with pytest.raises(CacheGeometryError, match="needs 5 each, 20 in all"):
        build(left=4, max_num_blocks=19)
    assert build(left=4, max_num_blocks=20).blocks_per_seq == 5


def test_fewer_blocks_than_streams_is_refused():
    with pytest.raises(CacheGeometryError, match="not one block a stream"):
        build(max_num_blocks=3)


def test_left_context_counts_chunks():
    config = build(chunk=8, left=3, block_size_frames=16)
    assert config.left_frames == 24
    assert config.blocks_per_seq == 2


def test_trained_window_pages_by_chunk_and_ignores_num_left_chunks(caplog):
    spec = PagedKV(layers=1, kv_heads=1, head_dim=8, window=56, prefilled=True)
    with caplog.at_level(logging.WARNING):
        config = build(spec, chunk=16, left=2)
    assert config.blocks_per_seq == 5  # ceil(56 / 16) + 1
    assert config.left_frames == 56
    assert "num_left_chunks=2 is ignored" in caplog.text


def test_derived_pool_is_bounded_by_memory():
    block = build().bytes_per_block
    config = build(available=100 * block)
    assert config.num_blocks == 100
    assert config.blocks_per_seq == 25


def test_derived_pool_that_does_not_fit_prints_the_arithmetic():
    with pytest.raises(CacheGeometryError, match="at least 20 blocks for 4 streams"):
        build(left=4, available=build().bytes_per_block * 19)


def test_vram_arithmetic(caplog):
    gib = 2**30
    with caplog.at_level(logging.INFO):
        available = available_on_cuda(32 * gib, 30 * gib, CacheOptions(), probe_bytes=gib)
    assert available == int(32 * gib * 0.9) - 2 * gib - int(1.5 * gib)
    assert "activation_reserve=1536 MiB" in caplog.text
    assert available_on_cuda(32 * gib, 30 * gib, CacheOptions(), 0) == int(32 * gib * 0.9) - 2 * gib - 256 * 2**20
