"""StreamStateStore: the one owner of streaming state, built from an encoder's declared specs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_core.cache.attention import IntArray, PagedAttentionCache, PagedCohort
from oasr_core.cache.dense import DenseAttentionCache, DenseCohort
from oasr_core.cache.sizing import CacheConfig
from oasr_core.cache.slots import RowIndex, SlotCache
from oasr_core.errors import UnknownRequestError
from oasr_core.models.base import Slot


class StreamStateStore:
    """Rows, paged (or dense) attention history and slots of up to ``max_streams`` streams."""

    def __init__(
        self,
        cache: CacheConfig | None,
        slots: Sequence[Slot],
        *,
        max_streams: int,
        dtype: torch.dtype,
        device: torch.device,
        paged: bool = True,
    ) -> None:
        self.max_streams = max_streams
        self._device = device
        self._rows: dict[str, int] = {}
        self._free = list(range(max_streams))
        self._slots = SlotCache(slots, max_streams, dtype, device)
        self.attention: PagedAttentionCache | DenseAttentionCache | None = None
        if cache is not None:
            self.attention = (PagedAttentionCache if paged else DenseAttentionCache)(cache, dtype, device)

    @property
    def num_streams(self) -> int:
        """Streams that hold state."""
        return len(self._rows)

    @property
    def free_blocks(self) -> int | None:
        """Free blocks of the paged pool, ``None`` without one."""
        return self.attention.pool.num_free if isinstance(self.attention, PagedAttentionCache) else None

    @property
    def bytes(self) -> int:
        """Bytes of all state, as allocated."""
        return self._slots.bytes + (self.attention.bytes if self.attention is not None else 0)

    def allocate(self, stream_id: str) -> None:
        """Give a stream its row and its initial state; a second time raises ``ValueError``."""
        if stream_id in self._rows:
            raise ValueError(f"stream {stream_id!r} already has a state")
        if not self._free:
            raise RuntimeError(f"all {self.max_streams} streaming rows are taken")
        row = self._free[0]
        self._slots.reset(row)
        if self.attention is not None:
            self.attention.allocate(row)
        self._rows[stream_id] = heapq.heappop(self._free)

    def free(self, stream_id: str) -> None:
        """Return a stream's row, blocks and slots; an unknown id raises ``UnknownRequestError`` (a ``KeyError``)."""
        row = self._rows.pop(stream_id, None)
        if row is None:
            raise UnknownRequestError(f"stream {stream_id!r} has no state; streams with state: {len(self._rows)}")
        try:
            if self.attention is not None:
                self.attention.free(row)
        finally:
            heapq.heappush(self._free, row)

    def row(self, stream_id: str) -> int:
        """The row of a stream."""
        return self._rows[stream_id]

    def at_capacity(self, offset: int, frames: int) -> bool:
        """Whether a stream at ``offset`` cannot take ``frames`` more encoder frames."""
        return self.attention is not None and self.attention.at_capacity(offset, frames)

    def cohort(self, stream_ids: Sequence[str], offsets: IntArray, counts: IntArray, chunk: int) -> Cohort:
        """The state of this step's streams, in the given order; blocks are prepared here, in one call."""
        rows = RowIndex([self._rows[stream_id] for stream_id in stream_ids], self._device)
        history = None
        if self.attention is not None:
            history = self.attention.prepare(rows, np.asarray(offsets), np.asarray(counts), chunk)
        return Cohort(self._slots, rows, history)


class Cohort:
    """:class:`oasr_core.models.base.CohortState` over a store."""

    def __init__(self, slots: SlotCache, rows: RowIndex, history: PagedCohort | DenseCohort | None) -> None:
        self._slots = slots
        self._rows = rows
        self._history = history

    @property
    def _attention(self) -> PagedCohort | DenseCohort:
        if self._history is None:
            raise RuntimeError("this encoder declares no PagedKV state, so there is no attention history")
        return self._history

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
        """Append this chunk and attend over retained history plus the chunk."""
        return self._attention.attend(layer, query, key, value, key_bias=key_bias, score_bias=score_bias, scale=scale)

    def key_positions(self) -> Tensor:
        """Positions of the keys that :meth:`attend` sees."""
        return self._attention.key_positions()

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """Rows of a slot, batch first."""
        return self._slots.read(name, self._rows, layer)

    def write(self, name: str, value: Tensor, layer: int | None = None) -> None:
        """Replace rows of a slot."""
        self._slots.write(name, self._rows, value, layer)
