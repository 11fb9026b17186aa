"""Paged attention history: block tables, ring addressing, eviction, and attention over it.

A stream's history is a ring of ``blocks_per_seq`` blocks: position ``p`` lies in ring slot ``p % capacity``, block
``table[row, slot // block_frames]``. As positions are part of the keys, the order of keys does not matter, so a ring
needs no shifting: eviction is a mask. Blocks are handed out at their *home* where it is free (it is, unless a test
takes it), which makes a stream's ring one contiguous stretch that attention reads in place; any other table is
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oasr_core.cache.block_pool import BlockPool
from oasr_core.cache.sizing import CacheConfig
from oasr_core.cache.slots import RowIndex

#: Reading a cohort as one batch costs its longest history for every row; past this waste rows are read one by one, and
#: so they are past a length where the call's own cost no longer counts.
_MAX_BATCH_WASTE = 1.25
_MAX_BATCH_KEYS = 512

#: Keys are read in multiples of this (the rest masked), which the CPU attention kernel serves faster.
_KEY_MULTIPLE = 16

IntArray = npt.NDArray[np.int64]


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU the pages are committed only when they are first touched."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(tuple(shape))


def first_visible(config: CacheConfig, offsets: IntArray, ends: IntArray) -> IntArray:
    """First position that a chunk ``[offset, end)`` may attend to, by left context and by what the ring still holds."""
    shift = config.left_frames if config.prefilled and config.left_frames is not None else 0
    first = np.full_like(offsets, -shift)
    if config.left_frames is not None:
        first = np.maximum(first, offsets - config.left_frames)
    oldest_block = (ends - 1 + shift) // config.block_frames - config.blocks_per_seq + 1
    if config.left_frames is None:
        first = np.maximum(first, oldest_block * config.block_frames)
    return first


@dataclass
class ReadPlan:
    """How a cohort's keys are reached this step: all rows in place, or by flat slot (``gather``), or row by row."""

    last: IntArray  # (batch,): position of the newest key
    first: IntArray  # (batch,): position of the oldest visible key
    used: IntArray  # (batch,): ring slots to read
    visible: Tensor | None  # (batch, keys) bool, None where every key is visible
    batched: bool
    gather: Tensor | None

    @property
    def keys(self) -> int:
        """Keys of the longest row."""
        return int(self.used.max())


class PagedAttentionCache:
    """Keys, values and per-key score biases of all streams, and their block tables."""

    def __init__(self, config: CacheConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        blocks, frames = config.num_blocks + 1, config.block_frames
        shape = (config.layers, blocks, frames, config.kv_heads, config.head_dim)
        self._keys = lazy_zeros(shape, dtype, device)
        self._values = lazy_zeros(shape, dtype, device)
        self._bias: Tensor | None = None
        if config.key_bias:
            self._bias = lazy_zeros((config.layers, config.kv_heads, blocks * frames), torch.float32, device)
        self._table = np.full((config.max_streams, config.blocks_per_seq), -1, dtype=np.int64)
        self._home = np.arange(config.max_streams * config.blocks_per_seq, dtype=np.int64).reshape(self._table.shape)
        self._shift = config.left_frames if config.prefilled and config.left_frames is not None else 0
        self._device = device

    @property
    def bytes(self) -> int:
        """Bytes of the pool as allocated (reserved, not necessarily committed)."""
        return self._keys.nbytes + self._values.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def allocate(self, row: int) -> None:
        """Begin a stream; a prefilled window takes its whole ring of zeros now."""
        self._table[row] = -1
        if self._shift:
            self._take(np.full(self.config.blocks_per_seq, row), np.arange(self.config.blocks_per_seq))

    def free(self, row: int) -> None:
        """Return a stream's blocks."""
        held = self._table[row][self._table[row] >= 0].tolist()
        self._table[row] = -1
        if held:  # unread frames have to be finite: a masked NaN would still poison through the weighted sum
            index = torch.tensor(held).to(self._device, non_blocking=True)
            self._keys[:, index] = 0
            self._values[:, index] = 0
        self.pool.free(held)

    def at_capacity(self, offset: int, frames: int) -> bool:
        """Whether ``frames`` more would not fit into the stream's ring (asked before dispatch)."""
        bounded = self.config.left_frames is not None or self.config.recycle
        return not bounded and offset + frames > self.config.capacity_frames

    def prepare(self, rows: RowIndex, offsets: IntArray, counts: IntArray, chunk: int) -> PagedCohort:
        """Blocks for the whole cohort in one pool call, then this step's write and read plan."""
        config = self.config
        row = np.asarray(rows.rows, dtype=np.int64)
        positions = offsets[:, None] + self._shift + np.arange(chunk)
        valid = np.arange(chunk) < counts[:, None]
        slots = positions % config.capacity_frames
        pages = slots // config.block_frames
        missing = valid & (self._table[row[:, None], pages] < 0)
        if missing.any():
            wanted = np.unique(
                np.stack([np.broadcast_to(row[:, None], pages.shape)[missing], pages[missing]], 1), axis=0
            )
            self._take(wanted[:, 0], wanted[:, 1])
        blocks = np.where(valid, self._table[row[:, None], pages], config.num_blocks)
        flat = blocks * config.block_frames + slots % config.block_frames
        write = torch.from_numpy(flat.reshape(-1)).to(self._device, non_blocking=True)
        return PagedCohort(self, rows, write, self._plan(rows, offsets, counts))

    def _take(self, rows: IntArray, pages: IntArray) -> None:
        self._table[rows, pages] = self.pool.allocate(self._home[rows, pages].tolist())

    def _plan(self, rows: RowIndex, offsets: IntArray, counts: IntArray) -> ReadPlan:
        config = self.config
        row = np.asarray(rows.rows, dtype=np.int64)
        ends = offsets + counts
        last = ends - 1 + self._shift
        used = np.minimum(-(-(last + 1) // _KEY_MULTIPLE) * _KEY_MULTIPLE, config.capacity_frames)
        keys = int(used.max())
        first = first_visible(config, offsets, ends) + self._shift
        ring = np.arange(keys)
        if last.max() < config.capacity_frames and first.max() <= 0:  # nothing has wrapped or left the window
            seen = ring <= last[:, None]
        else:
            seen = self._ring_positions(last, ring) >= np.maximum(first, 0)[:, None]
        visible = None if seen.all() else torch.from_numpy(seen).to(self._device, non_blocking=True)
        table = self._table[row, : -(-keys // config.block_frames)]
        at_home = bool(((table == self._home[row, : table.shape[1]]) | (table < 0)).all())
        short = keys <= _MAX_BATCH_KEYS and len(row) * keys <= _MAX_BATCH_WASTE * int(used.sum())
        gather = None
        if not at_home:
            # What is masked is read from a block of its own: the scratch block may hold anything.
            blocks = np.where(table < 0, table[:, :1], table)
            flat = blocks[:, ring // config.block_frames] * config.block_frames + ring % config.block_frames
            gather = torch.from_numpy(flat).to(self._device, non_blocking=True)
        # A CPU reads rows that do not lie side by side one by one, in place; elsewhere one gathered call is cheaper.
        batched = at_home and (self._device.type != "cpu" or (short and rows.span is not None))
        return ReadPlan(last, first, used, visible, batched, gather)

    def _ring_positions(self, last: IntArray, ring: IntArray) -> IntArray:
        """``(batch, keys)``: the newest position that each ring slot can hold, negative where it holds none."""
        return last[:, None] - (last[:, None] - ring) % self.config.capacity_frames

    def key_positions(self, plan: ReadPlan) -> Tensor:
        """``(batch, keys)`` int64 positions of the keys that a plan reads, -1 where masked."""
        positions = self._ring_positions(plan.last, np.arange(plan.keys))
        seen = positions >= np.maximum(plan.first, 0)[:, None]
        return torch.from_numpy(np.where(seen, positions - self._shift, -1)).to(self._device)

    def rings(self, pool: Tensor, layer: int) -> Tensor:
        """``(max_streams, capacity, kv_heads, head_dim)`` view of every stream's home ring."""
        config = self.config
        homes = pool[layer, : config.max_streams * config.blocks_per_seq]
        return homes.view(config.max_streams, config.capacity_frames, config.kv_heads, config.head_dim)

    def bias_rings(self, layer: int) -> Tensor:
        """``(max_streams, kv_heads, capacity)`` view of the per-key score biases."""
        config = self.config
        if self._bias is None:
            raise RuntimeError("this cache keeps no key bias")
        homes = self._bias[layer, :, : config.max_streams * config.capacity_frames]
        return homes.view(config.kv_heads, config.max_streams, config.capacity_frames).transpose(0, 1)


class PagedCohort:
    """One step's view of the rows of a cohort."""

    def __init__(self, cache: PagedAttentionCache, rows: RowIndex, write_slots: Tensor, plan: ReadPlan) -> None:
        self._cache = cache
        self._rows = rows
        self._slots = write_slots
        self._plan = plan

    def key_positions(self) -> Tensor:
        """``(batch, keys)`` int64, -1 where masked."""
        return self._cache.key_positions(self._plan)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        score_bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See :class:`oasr_core.models.base.CohortState`."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self._append(layer, key, value, key_bias, scale)
        query = query.transpose(1, 2)
        scores = None if score_bias is None else score_bias * scale
        if self._plan.gather is not None or self._plan.batched:
            keys, values, mask = self._read_batch(layer, key_bias is not None)
            return attention(query, keys, values, mask, scores, scale).transpose(1, 2)
        out = torch.empty_like(query)
        for place in range(query.shape[0]):
            keys, values, mask = self._read_row(layer, place, key_bias is not None)
            bias = None if scores is None else scores[place : place + 1, ..., : keys.shape[2]]
            out[place] = attention(query[place : place + 1], keys, values, mask, bias, scale)[0]
        return out.transpose(1, 2)

    def _append(self, layer: int, key: Tensor, value: Tensor, key_bias: Tensor | None, scale: float) -> None:
        cache = self._cache
        shape = (-1, cache.config.kv_heads, cache.config.head_dim)
        cache._keys[layer].view(shape).index_copy_(0, self._slots, key.reshape(shape))
        cache._values[layer].view(shape).index_copy_(0, self._slots, value.reshape(shape))
        if key_bias is not None and cache._bias is not None:
            scaled = key_bias.to(torch.float32).reshape(-1, cache.config.kv_heads).t() * scale
            cache._bias[layer].index_copy_(1, self._slots, scaled)

    def _read_batch(self, layer: int, with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        cache, plan = self._cache, self._plan
        count = plan.keys
        if plan.gather is not None:
            shape = (-1, cache.config.kv_heads, cache.config.head_dim)
            keys, values = (pool[layer].view(shape)[plan.gather] for pool in (cache._keys, cache._values))
            bias = cache._bias[layer][:, plan.gather].transpose(0, 1) if with_bias and cache._bias is not None else None
        else:
            keys, values = (self._pick(cache.rings(pool, layer)[:, :count]) for pool in (cache._keys, cache._values))
            bias = self._pick(cache.bias_rings(layer)[..., :count]) if with_bias else None
        return keys.transpose(1, 2), values.transpose(1, 2), key_mask(bias, plan.visible)

    def _pick(self, rings: Tensor) -> Tensor:
        return rings.narrow(0, *self._rows.span) if self._rows.span is not None else rings[self._rows.index]

    def _read_row(self, layer: int, place: int, with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        cache, plan = self._cache, self._plan
        row, count = self._rows.rows[place], int(plan.used[place])
        keys, values = (cache.rings(pool, layer)[row : row + 1, :count] for pool in (cache._keys, cache._values))
        bias = cache.bias_rings(layer)[row : row + 1, :, :count] if with_bias else None
        visible = None if plan.visible is None else plan.visible[place : place + 1, :count]
        return keys.transpose(1, 2), values.transpose(1, 2), key_mask(bias, visible)


def key_mask(bias: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """Additive ``(batch, heads or 1, 1, keys)`` float32 mask from scaled key biases and visibility."""
    if bias is None:
        if visible is None:
            return None
        bias = torch.zeros(visible.shape[0], 1, visible.shape[1], device=visible.device)
    if visible is not None:
        bias = bias.masked_fill(~visible[:, None], float("-inf"))
    return bias.unsqueeze(2)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Tensor | None, scale: float
) -> Tensor:
    """Scaled dot-product attention with additive terms; all ``(batch, heads, length, dim)``."""
    if scores is not None:
        mask = scores if mask is None else mask + scores
    if mask is not None and query.device.type != "cpu":
        mask = mask.to(query.dtype)  # other devices' kernels take no float32 mask for half precision
    grouped = keys.shape[1] != query.shape[1]
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
