"""Geometry and size of the paged cache: :class:`CacheConfig`, its checks and its derivation from memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from oasr_core.cache.options import CacheOptions
from oasr_core.errors import CacheGeometryError
from oasr_core.models.base import PagedKV

logger = logging.getLogger(__name__)

_MIN_RESERVE = 256 * 2**20


@dataclass(frozen=True)
class CacheConfig:
    """The paged pool in the geometry it is built with. Frames are encoder frames.

    A stream owns up to ``blocks_per_seq`` blocks, used as a ring; of its history it attends to the last ``left_frames``
    (``None``: all that is kept).
    """

    layers: int
    kv_heads: int
    head_dim: int
    key_bias: bool
    block_frames: int
    blocks_per_seq: int
    num_blocks: int
    max_streams: int
    chunk_size: int
    left_frames: int | None
    prefilled: bool
    recycle: bool
    element_size: int

    @property
    def bounded(self) -> bool:
        """Whether a stream's history has a bound of its own."""
        return self.left_frames is not None

    @property
    def capacity_frames(self) -> int:
        """Frames that one stream's ring holds."""
        return self.blocks_per_seq * self.block_frames

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: keys and values, and a float32 score per key and head where kept."""
        frames = self.layers * self.block_frames
        bias = 4 * frames * self.kv_heads if self.key_bias else 0
        return 2 * frames * self.kv_heads * self.head_dim * self.element_size + bias

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, one scratch block included."""
        return (self.num_blocks + 1) * self.bytes_per_block


def blocks_per_stream(spec: PagedKV, options: CacheOptions, chunk_size: int, num_left_chunks: int, block: int) -> int:
    """Blocks that one stream needs: its window plus the current chunk, or the table's width with unlimited history."""
    if spec.window is not None:
        return math.ceil(spec.window / chunk_size) + 1
    if num_left_chunks < 0:
        return options.max_blocks_per_seq
    return math.ceil(chunk_size * (num_left_chunks + 1) / block)


def build_cache_config(
    spec: PagedKV,
    options: CacheOptions,
    *,
    chunk_size: int,
    num_left_chunks: int,
    max_streams: int,
    element_size: int,
    available_bytes: int | None = None,
) -> CacheConfig:
    """Fit chunk, blocks, left context and pool together, or raise :class:`CacheGeometryError` with the arithmetic.

    ``available_bytes`` bounds a derived pool (``max_num_blocks`` unset); ``None`` means nothing to measure against.
    """
    block = _block_frames(spec, options, chunk_size, num_left_chunks)
    per_stream = blocks_per_stream(spec, options, chunk_size, num_left_chunks, block)
    left = spec.window if spec.window is not None else (chunk_size * num_left_chunks if num_left_chunks >= 0 else None)
    ceiling = CacheConfig(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        key_bias=spec.key_bias,
        block_frames=block,
        blocks_per_seq=per_stream,
        num_blocks=max_streams * per_stream,
        max_streams=max_streams,
        chunk_size=chunk_size,
        left_frames=left,
        prefilled=spec.prefilled,
        recycle=options.recycle_streaming_history,
        element_size=element_size,
    )
    if ceiling.bounded and options.max_blocks_per_seq < per_stream:
        raise CacheGeometryError(
            f"max_blocks_per_seq={options.max_blocks_per_seq} is less than the {per_stream} blocks that "
            f"num_left_chunks={num_left_chunks} with chunk_size={chunk_size} needs per stream."
        )
    if options.max_num_blocks is not None:
        return check_recycling(_explicit_pool(ceiling, options.max_num_blocks))
    return ceiling if available_bytes is None else _derived_pool(ceiling, available_bytes)


def _block_frames(spec: PagedKV, options: CacheOptions, chunk_size: int, num_left_chunks: int) -> int:
    """Frames per block: what is set, else the chunk; a trained window pages by chunk and says what it ignores."""
    given = options.block_size_frames if "block_size_frames" in options.model_fields_set else chunk_size
    if spec.window is not None:
        ignored = {"num_left_chunks": num_left_chunks} if num_left_chunks >= 0 else {}
        ignored |= {"block_size_frames": given} if given != chunk_size else {}
        for name, value in ignored.items():
            logger.warning("%s=%d is ignored: this encoder was trained with a window of %d", name, value, spec.window)
        return chunk_size
    if chunk_size > given:
        raise CacheGeometryError(
            f"chunk_size={chunk_size} is larger than block_size_frames={given}: a chunk has to fit into a block. "
            f"Set block_size_frames to {chunk_size} or more, or leave it unset."
        )
    return given


def _explicit_pool(ceiling: CacheConfig, num_blocks: int) -> CacheConfig:
    """A pool of ``max_num_blocks``: each stream is capped at its share."""
    streams, wanted = ceiling.max_streams, ceiling.blocks_per_seq
    share = num_blocks // streams
    if ceiling.bounded and share < wanted:
        raise CacheGeometryError(
            f"max_num_blocks={num_blocks} gives each of {streams} streams {share} blocks; {ceiling.left_frames} frames "
            f"of left context with chunk_size={ceiling.chunk_size} needs {wanted} each, {ceiling.num_blocks} in all."
        )
    if share < 1:
        raise CacheGeometryError(
            f"max_num_blocks={num_blocks} is less than max_batch_size={streams}: not one block a stream. Raise "
            "max_num_blocks or lower max_batch_size."
        )
    return replace(ceiling, blocks_per_seq=min(share, wanted), num_blocks=num_blocks)


def _derived_pool(ceiling: CacheConfig, available_bytes: int) -> CacheConfig:
    """As many blocks as memory allows, up to what the block table can address."""
    fitting = min(available_bytes // ceiling.bytes_per_block, ceiling.num_blocks)
    minimum = ceiling.num_blocks if ceiling.bounded else ceiling.max_streams * 2
    if fitting < minimum:
        raise CacheGeometryError(
            f"the paged KV pool does not fit: {available_bytes / 2**20:.0f} MiB available, {ceiling.bytes_per_block} "
            f"bytes a block, at least {minimum} blocks for {ceiling.max_streams} streams. Lower max_batch_size or "
            "num_left_chunks, raise gpu_memory_utilization or cpu_memory_utilization, or set max_num_blocks."
        )
    share = min(ceiling.blocks_per_seq, fitting // ceiling.max_streams)
    return replace(ceiling, blocks_per_seq=share, num_blocks=fitting)


def check_recycling(config: CacheConfig) -> CacheConfig:
    """Recycling frees whole blocks: what is left has to hold the current chunk, wherever it lies over block borders."""
    straddles = config.block_frames % config.chunk_size != 0
    if config.recycle and config.left_frames is None and straddles and config.blocks_per_seq < 2:
        raise CacheGeometryError(
            f"recycle_streaming_history needs two blocks a stream where chunk_size={config.chunk_size} does not divide "
            f"block_size_frames={config.block_frames}; raise max_num_blocks."
        )
    return config


def ram_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_on_cpu(options: CacheOptions) -> int:
    """Bytes that a derived pool may reserve on the CPU; logged with its arithmetic."""
    total = ram_bytes()
    available = int(total * options.cpu_memory_utilization)
    logger.info(
        "paged KV pool on the CPU: total=%d MiB x cpu_memory_utilization=%.2f -> available=%d MiB "
        "(committed when touched)",
        total >> 20,
        options.cpu_memory_utilization,
        available >> 20,
    )
    return available


def available_on_cuda(total: int, free: int, options: CacheOptions, probe_bytes: int) -> int:
    """``total x utilization - resident - reserve``; resident is read from the driver, the reserve from a probe
    forward.
    """
    resident = total - free
    reserve = max(int(1.5 * probe_bytes), _MIN_RESERVE)
    available = int(total * options.gpu_memory_utilization) - resident - reserve
    logger.info(
        "paged KV pool derived from VRAM: total=%d MiB resident=%d MiB cap=%.2f "
        "activation_reserve=%d MiB -> available=%d MiB",
        total >> 20,
        resident >> 20,
        options.gpu_memory_utilization,
        reserve >> 20,
        available >> 20,
    )
    return max(available, 0)
