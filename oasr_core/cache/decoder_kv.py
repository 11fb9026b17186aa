"""Key-value history of autoregressive decoders: dense or paged, one length for each row.

A row is one hypothesis. A step appends the same number of positions to every row, of which a row counts ``valid`` ones
(prompts differ in length); what lies past a row's length is finite and masked. Both forms give the same numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from oasr_core.cache.block_pool import BlockPool
from oasr_core.models.base import DecoderKV
from oasr_core.models.layers import MASKED, attention
from oasr_core.staging import to_device

#: Tokens of one page, and the multiple that dense rows grow by.
PAGE = 16


def pages(tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return math.ceil(tokens / PAGE)


def bytes_per_token(spec: DecoderKV, element_size: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * element_size


class DecoderCache(ABC):
    """History of the rows of one decode group.

    A step is ``begin``, one ``attend`` a layer (by the network, through the returned
    :class:`~oasr_core.models.base.DecoderState`), ``commit``.
    """

    def __init__(self, spec: DecoderKV, lengths: Sequence[int], device: torch.device) -> None:
        self.spec = spec
        self.device = device
        #: Tokens in each row.
        self.lengths = list(lengths)

    def begin(self, tokens: int, valid: Sequence[int] | None = None) -> DecoderStep:
        """Room for ``tokens`` more positions in every row; ``valid`` counts those of each that are real."""
        self._make_room(max(self.lengths, default=0) + tokens)
        return DecoderStep(self, tokens, [tokens] * len(self.lengths) if valid is None else valid)

    def commit(self, step: DecoderStep) -> None:
        """Count the positions of a step that every layer has seen."""
        self.lengths = [length + count for length, count in zip(self.lengths, step.valid, strict=True)]

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of ``rows`` (a row may be taken several times)."""

    @abstractmethod
    def drop(self, first: int, count: int) -> None:
        """Remove ``count`` rows from ``first`` on; the last ``count`` rows take their places."""

    @abstractmethod
    def extend(self, other: DecoderCache) -> None:
        """Append the rows of ``other``, which is used up."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back."""

    @abstractmethod
    def _make_room(self, tokens: int) -> None:
        """Be able to hold ``tokens`` positions in every row."""

    @abstractmethod
    def write(self, layer: int, step: DecoderStep, key: Tensor, value: Tensor) -> None:
        """Store ``(rows, tokens, kv_heads, head_dim)`` at the positions of ``step``."""

    @abstractmethod
    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``span`` positions: ``(rows, span, kv_heads, head_dim)`` each."""


class DecoderStep:
    """The :class:`~oasr_core.models.base.DecoderState` of one step."""

    def __init__(self, cache: DecoderCache, tokens: int, valid: Sequence[int]) -> None:
        self.cache = cache
        self.tokens = tokens
        self.valid = list(valid)
        lengths = cache.lengths
        #: The length of all rows where they agree.
        self.uniform = lengths[0] if lengths and min(lengths) == max(lengths) else None
        self._starts = to_device(lengths, torch.int64, cache.device)
        self._positions = self._starts[:, None] + torch.arange(tokens, device=cache.device)
        self._span = pages(max(lengths, default=0) + tokens) * PAGE
        self._bias: Tensor | None = None
        #: Page and slot of each position, in a paged cache: the same in every layer.
        self.places: tuple[Tensor, Tensor] | None = None

    def positions(self) -> Tensor:
        """``(rows, tokens)`` int64."""
        return self._positions

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append and attend; see :class:`~oasr_core.models.base.DecoderState`."""
        self.cache.write(layer, self, key, value)
        if self.uniform == 0 and self.tokens > 1:
            return attention(query, *_repeated(query, key, value), causal=True)
        keys, values = self.cache.read(layer, self._span)
        return attention(query, *_repeated(query, keys, values), bias=self._mask())

    def _mask(self) -> Tensor:
        """``(rows, 1, tokens, span)``: a token sees its own position and what lies before it."""
        if self._bias is None:
            hidden = torch.arange(self._span, device=self.cache.device) > self._positions[:, :, None]
            bias = torch.zeros(hidden.shape, device=self.cache.device).masked_fill_(hidden, MASKED)
            self._bias = bias[:, None]
        return self._bias


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the query has."""
    times = query.shape[2] // key.shape[2]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dim=2), value.repeat_interleave(times, dim=2)


class DenseDecoderCache(DecoderCache):
    """One tensor ``(rows, layers, 2, kv_heads, capacity, head_dim)``; both leading capacities grow by doubling."""

    def __init__(self, spec: DecoderKV, rows: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, [0] * rows, device)
        self._data = self._zeros(rows, PAGE, dtype)

    def _zeros(self, rows: int, capacity: int, dtype: torch.dtype) -> Tensor:
        spec = self.spec
        return torch.zeros(
            rows, spec.layers, 2, spec.kv_heads, capacity, spec.head_dim, dtype=dtype, device=self.device
        )

    def _resize(self, rows: int, capacity: int) -> None:
        old = self._data
        self._data = self._zeros(rows, capacity, old.dtype)
        self._data[: old.shape[0], :, :, :, : old.shape[4]] = old

    def _make_room(self, tokens: int) -> None:
        if tokens > self._data.shape[4]:
            self._resize(self._data.shape[0], max(pages(tokens) * PAGE, 2 * self._data.shape[4]))

    def write(self, layer: int, step: DecoderStep, key: Tensor, value: Tensor) -> None:
        """Store a step's keys and values."""
        rows = self._data[: len(self.lengths), layer]
        if step.uniform is not None:
            place = slice(step.uniform, step.uniform + step.tokens)
            rows[:, 0, :, place] = key.transpose(1, 2)
            rows[:, 1, :, place] = value.transpose(1, 2)
            return
        index = torch.arange(len(self.lengths), device=self.device)[:, None]
        rows[:, 0][index, :, step.positions()] = key
        rows[:, 1][index, :, step.positions()] = value

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Views; nothing is copied."""
        rows = self._data[: len(self.lengths), layer, :, :, :span]
        return rows[:, 0].transpose(1, 2), rows[:, 1].transpose(1, 2)

    def select(self, rows: Sequence[int]) -> None:
        """Copy what the rows hold so far."""
        used = pages(max(self.lengths, default=0)) * PAGE
        picked = self._data[:, :, :, :, :used].index_select(0, to_device(rows, torch.int64, self.device))
        if len(rows) > self._data.shape[0]:
            self._data = self._zeros(len(rows), self._data.shape[4], self._data.dtype)
        self._data[: len(rows), :, :, :, :used] = picked
        self.lengths = [self.lengths[row] for row in rows]

    def drop(self, first: int, count: int) -> None:
        """Move the last rows into the gap."""
        last = len(self.lengths) - count
        if first != last:
            self._data[first : first + count] = self._data[last : last + count]
            self.lengths[first : first + count] = self.lengths[last:]
        self._data[last : last + count].zero_()
        del self.lengths[last:]

    def extend(self, other: DecoderCache) -> None:
        """Copy the rows of another dense cache behind the own ones."""
        if not isinstance(other, DenseDecoderCache):
            raise TypeError(f"a dense cache cannot take in a {type(other).__name__}")
        rows, more = len(self.lengths), len(other.lengths)
        capacity = max(self._data.shape[4], other._data.shape[4])
        if rows + more > self._data.shape[0] or capacity > self._data.shape[4]:
            self._resize(max(rows + more, self._data.shape[0]), capacity)
        place = self._data[rows : rows + more]
        place[:, :, :, :, : other._data.shape[4]] = other._data[:more]
        self.lengths += other.lengths
        other.release()

    def release(self) -> None:
        """Let the memory go."""
        self._data = self._data[:0]
        self.lengths = []


class PagedDecoderPool:
    """Pages of :data:`PAGE` tokens that all paged caches of an engine share."""

    def __init__(self, spec: DecoderKV, num_pages: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.blocks = BlockPool(num_pages)
        shape = (spec.layers, 2, num_pages + 1, PAGE, spec.kv_heads, spec.head_dim)
        #: The last page is nobody's: tables are padded with it.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.device = device

    def open(self, ceilings: Sequence[int]) -> PagedDecoderCache:
        """Rows that may grow to ``ceilings`` tokens each; raises ``CachePoolExhausted`` where pages are missing."""
        tables = []
        try:
            for ceiling in ceilings:
                tables.append(self.blocks.allocate([-1] * pages(ceiling)))
        except Exception:
            for table in tables:
                self.blocks.free(table)
            raise
        return PagedDecoderCache(self, tables)


class PagedDecoderCache(DecoderCache):
    """Rows as tables of pages; merging and dropping move no data. A row's pages are its own until it ends."""

    def __init__(self, pool: PagedDecoderPool, tables: list[list[int]]) -> None:
        super().__init__(pool.spec, [0] * len(tables), pool.device)
        self._pool = pool
        self._tables = tables
        self._index: Tensor | None = None

    def _make_room(self, tokens: int) -> None:
        self._index = self._index if self._index is not None and self._index.shape[1] >= pages(tokens) else None
        if self._index is None:
            width = max(max(len(table) for table in self._tables), pages(tokens))
            scratch = self._pool.blocks.num_blocks
            padded = [table + [scratch] * (width - len(table)) for table in self._tables]
            self._index = to_device(padded, torch.int64, self.device)

    def _table(self) -> Tensor:
        if self._index is None:
            raise RuntimeError("a paged cache is read or written outside a step")
        return self._index

    def write(self, layer: int, step: DecoderStep, key: Tensor, value: Tensor) -> None:
        """Store a step's keys and values; positions past a row's pages (its padding) go nowhere that is read."""
        if step.places is None:
            positions = step.positions()
            step.places = self._table().gather(1, positions // PAGE), positions % PAGE
        page, slot = step.places
        self._pool.data[layer, 0][page, slot] = key
        self._pool.data[layer, 1][page, slot] = value
        if step.tokens > 1:
            # Padding may have gone to the page that everybody reads masked, where only finite values do no harm.
            self._pool.data[layer, :, self._pool.blocks.num_blocks] = 0

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Gathered copies."""
        table = self._table()[:, : pages(span)]
        shape = (table.shape[0], span, self.spec.kv_heads, self.spec.head_dim)
        data = self._pool.data[layer]
        return data[0][table].view(shape), data[1][table].view(shape)

    def select(self, rows: Sequence[int]) -> None:
        """Only an order of the same rows: pages are not shared between hypotheses."""
        if sorted(rows) != list(range(len(self._tables))):
            raise RuntimeError(f"rows {list(rows)} of a paged cache would share pages; beams are dense")
        self._tables = [self._tables[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._index = None

    def drop(self, first: int, count: int) -> None:
        """Free the pages of the dropped rows."""
        last = len(self._tables) - count
        for table in self._tables[first : first + count]:
            self._free(table)
        self._tables[first : first + count] = self._tables[last:]
        self.lengths[first : first + count] = self.lengths[last:]
        del self._tables[last:], self.lengths[last:]
        self._index = None

    def extend(self, other: DecoderCache) -> None:
        """Take over the other's tables."""
        if not isinstance(other, PagedDecoderCache) or other._pool is not self._pool:
            raise TypeError(f"a paged cache cannot take in a {type(other).__name__}")
        self._tables += other._tables
        self.lengths += other.lengths
        other._tables, other.lengths = [], []
        self._index = None

    def release(self) -> None:
        """Free every page."""
        for table in self._tables:
            self._free(table)
        self._tables, self.lengths, self._index = [], [], None

    def _free(self, table: list[int]) -> None:
        """Zero the pages first: a masked key still reaches the output where its value is not finite."""
        self._pool.data[:, :, table] = 0
        self._pool.blocks.free(table)


class MemoryBudget:
    """Bytes set aside under a key each; ``limit`` ``None`` lets everything through, and counts it."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._reserved: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Bytes that are set aside."""
        return sum(self._reserved.values())

    def reserve(self, key: str, size: int) -> bool:
        """Set ``size`` bytes aside under ``key``; ``False`` where they are not free."""
        if self.limit is not None and self.used + size > self.limit:
            return False
        self._reserved[key] = size
        return True

    def release(self, key: str) -> None:
        """Free what ``key`` holds, if anything."""
        self._reserved.pop(key, None)
