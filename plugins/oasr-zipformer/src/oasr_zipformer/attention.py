"""Attention: weights that are computed once a layer, and the modules that use them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers import Linear

if TYPE_CHECKING:
    from oasr_zipformer.config import StackConfig
    from oasr_zipformer.layouts import Layout

# Queries at a time on the CPU, so that their scores and position scores stay in the cache.
_QUERIES = 64


def position_table(positions: int, dim: int, device: torch.device) -> Tensor:
    """CompactRelPositionalEncoding: ``(2 positions - 1, dim)`` float32 for offsets ``-(positions - 1) ..``.

    The offset of key from query is compressed logarithmically, put on a circle by the arc tangent, and expanded in the
    circle's harmonics; the last column is one. Source: "Zipformer", Yao et al. 2023, and icefall's ``zipformer.py``.
    """
    offset = torch.arange(1 - positions, positions, dtype=torch.float64, device=device)
    scale = dim**0.5
    compressed = scale * offset.sign() * torch.log1p(offset.abs() / scale)
    angle = torch.atan(compressed * (2 * math.pi / dim)).unsqueeze(1)
    harmonic = angle * torch.arange(1, dim // 2 + 1, dtype=torch.float64, device=device)
    table = torch.stack([harmonic.cos(), harmonic.sin()], dim=2).flatten(1)
    table[:, -1] = 1.0
    return table.float()


class AttentionWeights(nn.Module):
    """Softmax over ``query . key + position query . projected offset``, without a scale.

    Heads come first in every batch of matrices, so that those of the first head, which the non-linear attention uses
    alone, lie at the front.
    """

    def __init__(self, config: StackConfig, pos_dim: int) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.query_dim = config.num_heads * config.query_head_dim
        self.pos_head_dim = config.pos_head_dim
        self.in_proj = Linear(config.dim, 2 * self.query_dim + config.num_heads * config.pos_head_dim)
        # Read by reserve() only.
        self.linear_pos = _PositionProjection(pos_dim, config.num_heads * config.pos_head_dim)
        self._positions = 0
        self._table: Tensor

    def reserve(self, positions: int, table: Tensor) -> None:
        """Project ``table`` of :func:`position_table` for ``positions``: ``(heads, pos_head_dim, offsets)``."""
        weight = self.linear_pos.weight
        projected = F.linear(table, weight.float()).view(-1, self.heads, self.pos_head_dim)
        self._table = projected.permute(1, 2, 0).to(weight.dtype).contiguous()
        self._positions = positions

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to weights ``(heads * batch, frames, keys)``."""
        query, key, position = self.in_proj(x).split(
            [self.query_dim, self.query_dim, self.heads * self.pos_head_dim], dim=2
        )
        key = layout.extend("key", key)
        frames, keys = query.shape[1], key.shape[1]
        query, key = self._heads_first(query).flatten(0, 1), self._heads_first(key).flatten(0, 1).transpose(1, 2)
        position = self._heads_first(position)
        step = frames if x.device.type != "cpu" else min(frames, _QUERIES)
        if step == frames:
            return self._softmax(query, key, position, 0, layout)
        weights = query.new_empty(query.shape[0], frames, keys)
        for start in range(0, frames, step):
            rows = slice(start, start + step)
            weights[:, rows] = self._softmax(query[:, rows], key, position[:, :, rows], start, layout)
        return weights

    def _softmax(self, query: Tensor, key: Tensor, position: Tensor, start: int, layout: Layout) -> Tensor:
        """Weights of the queries from frame ``start`` on."""
        batch, count, keys = query.shape[0] // self.heads, query.shape[1], key.shape[2]
        # Offsets run from the oldest key of the last query to the newest key of the first.
        lowest = self._positions - 1 - (keys - layout.frames) - (start + count - 1)
        width = keys + count - 1
        table = self._table[:, :, lowest : lowest + width]
        by_offset = torch.bmm(position.flatten(1, 2), table)  # (heads, batch * count, width)
        # Query i wants its offsets from count - 1 - i on: a shift by one from row to row.
        by_key = by_offset.as_strided(
            (self.heads * batch, count, keys), (count * width, width - 1, 1), by_offset.storage_offset() + count - 1
        )
        scores = torch.baddbmm(by_key, query, key)
        if layout.mask is not None:
            scores.view(self.heads, batch, count, keys).add_(layout.mask)
        return torch.softmax(scores, dim=-1)

    def _heads_first(self, x: Tensor) -> Tensor:
        """``(batch, frames, heads * n)`` to ``(heads, batch, frames, n)``, contiguous."""
        return x.view(*x.shape[:2], self.heads, -1).permute(2, 0, 1, 3).contiguous()


class SelfAttention(nn.Module):
    """Values, weighted and projected."""

    def __init__(self, config: StackConfig, index: int) -> None:
        """``index``: whether it is the first (0) or the second (1) of its layer."""
        super().__init__()
        self.heads = config.num_heads
        self.history = f"value{index + 1}"
        width = config.num_heads * config.value_head_dim
        self.in_proj = Linear(config.dim, width)
        self.out_proj = Linear(width, config.dim)

    def forward(self, x: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """``x + attention(x)``, ``(batch, frames, dim)``, with ``weights`` of :class:`AttentionWeights`."""
        value = layout.extend(self.history, self.in_proj(x))
        value = value.view(*value.shape[:2], self.heads, -1).permute(2, 0, 1, 3).flatten(0, 1)
        mixed = torch.bmm(weights, value).view(self.heads, *x.shape[:2], -1)
        return self.out_proj.add_to(x, mixed.permute(1, 2, 0, 3).flatten(2))


class NonlinAttention(nn.Module):
    """``out((weights @ (x tanh(s))) y)`` with the first head's weights, where ``s``, ``x``, ``y`` are projections."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.in_proj: Linear | None = Linear(config.dim, 3 * config.nonlin_dim)
        self.out_proj = Linear(config.nonlin_dim, config.dim)
        self.gate: Linear
        self.value: Linear
        self.factor: Linear

    def fold(self) -> None:
        """Split the three projections."""
        assert self.in_proj is not None
        parts = zip(self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3), strict=True)
        self.gate, self.value, self.factor = (Linear.from_weights(weight, bias) for weight, bias in parts)
        self.in_proj = None

    def forward(self, x: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """``x + attention(x)``, ``(batch, frames, dim)``."""
        value = layout.extend("nonlin", self.value.multiply(self.gate(x).tanh_(), x))
        mixed = torch.bmm(weights[: x.shape[0]], value)
        return self.out_proj.add_to(x, self.factor.multiply(mixed, x))


class _PositionProjection(nn.Module):
    """Weight of ``linear_pos``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)


def history_parts(config: StackConfig) -> dict[str, int]:
    """What each frame leaves behind for later chunks, name -> width, in the order of the state's last axis."""
    value = config.num_heads * config.value_head_dim
    return {
        "key": config.num_heads * config.query_head_dim,
        "nonlin": config.nonlin_dim,
        "value1": value,
        "value2": value,
    }
