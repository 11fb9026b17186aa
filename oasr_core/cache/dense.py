"""Dense attention history (``use_paged_cache=False``): one growing tensor per stream and layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oasr_core.cache.attention import IntArray, attention, first_visible, key_mask
from oasr_core.cache.sizing import CacheConfig
from oasr_core.cache.slots import RowIndex


class DenseAttentionCache:
    """The same history as the paged cache, kept by concatenation; the plain reference for it."""

    def __init__(self, config: CacheConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype = dtype
        self._device = device
        self._history: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {}

    @property
    def bytes(self) -> int:
        """Bytes that the histories hold now."""
        return sum(
            sum(tensor.nbytes for tensor in layer if tensor is not None)
            for layers in self._history.values()
            for layer in layers
        )

    def allocate(self, row: int) -> None:
        """Begin a stream, with zeros for a prefilled window."""
        config = self.config
        frames = config.left_frames if config.prefilled and config.left_frames is not None else 0
        shape = (frames, config.kv_heads, config.head_dim)
        self._history[row] = [
            (
                torch.zeros(shape, dtype=self._dtype, device=self._device),
                torch.zeros(shape, dtype=self._dtype, device=self._device),
                torch.zeros(shape[:2], device=self._device) if config.key_bias else None,
            )
            for _ in range(config.layers)
        ]

    def free(self, row: int) -> None:
        """Forget a stream."""
        del self._history[row]

    def at_capacity(self, offset: int, frames: int) -> bool:
        """The same ceiling as the paged cache, so that both end a stream at the same place."""
        bounded = self.config.left_frames is not None or self.config.recycle
        return not bounded and offset + frames > self.config.capacity_frames

    def prepare(self, rows: RowIndex, offsets: IntArray, counts: IntArray, chunk: int) -> DenseCohort:
        """This step's view."""
        return DenseCohort(self, rows, offsets, counts)


class DenseCohort:
    """One step's view of the rows of a cohort."""

    def __init__(self, cache: DenseAttentionCache, rows: RowIndex, offsets: IntArray, counts: IntArray) -> None:
        self._cache = cache
        self._rows = rows
        self._counts = counts
        self._first = first_visible(cache.config, offsets, offsets + counts)
        self._ends = offsets + counts

    def key_positions(self) -> Tensor:
        """``(batch, keys)`` int64, -1 where masked."""
        width = int((self._ends - self._first).max())
        positions = self._first[:, None] + np.arange(width)
        return torch.from_numpy(np.where(positions < self._ends[:, None], positions, -1))

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
        out = torch.empty_like(query)
        for place, row in enumerate(self._rows.rows):
            count = int(self._counts[place])
            keep = int(self._ends[place] - self._first[place])
            old_keys, old_values, old_bias = self._cache._history[row][layer]
            keys = torch.cat([old_keys, key[place, :count]])[-keep:]
            values = torch.cat([old_values, value[place, :count]])[-keep:]
            bias = None
            if key_bias is not None and old_bias is not None:
                bias = torch.cat([old_bias, key_bias[place, :count].to(torch.float32) * scale])[-keep:]
            self._cache._history[row][layer] = (keys, values, bias)
            mask = key_mask(None if bias is None else bias.t()[None], None)
            scores = None if score_bias is None else score_bias[place : place + 1, ..., :keep] * scale
            mine = attention(
                query[place : place + 1].transpose(1, 2),
                keys[None].transpose(1, 2),
                values[None].transpose(1, 2),
                mask,
                scores,
                scale,
            )
            out[place] = mine[0].transpose(0, 1)
        return out
