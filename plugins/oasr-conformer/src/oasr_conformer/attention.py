"""Self-attention whose position term is folded into the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers import Linear

if TYPE_CHECKING:
    from oasr_conformer.config import EncoderConfig
    from oasr_conformer.layouts import Layout


class SelfAttention(nn.Module):
    """Multi-head self-attention, plain or with WeNet's position term.

    WeNet scores key ``j``, which carries the projected absolute position ``p_j``, as
    ``(q + u) k_j + (q + v) p_j`` (no relative shift). With ``q' = q + u`` that is ``q' (k_j + p_j) + (v - u) p_j``:
    ``u`` goes into the query's bias, ``p_j`` into the key when it is written, and what remains is a constant per
    position and head. Any attention kernel that takes an additive mask then serves.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        dim = config.output_size
        self.index = index
        self.heads = config.attention_heads
        self.head_dim = dim // self.heads
        self.linear_q: Linear | None = Linear(dim, dim, bias=config.query_bias)
        self.linear_k: Linear | None = Linear(dim, dim, bias=config.key_bias)
        self.linear_v: Linear | None = Linear(dim, dim, bias=config.value_bias)
        self.linear_out = Linear(dim, dim)
        self.relative = config.relative_attention
        if self.relative:
            # Read by set_positions only, hence no packable layer.
            self.linear_pos = _PositionProjection(dim)
            self.pos_bias_u = nn.Parameter(torch.zeros(self.heads, self.head_dim))
            self.pos_bias_v = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        self.qkv: Linear | None = None
        self.position_keys: Tensor | None = None
        self.position_bias: Tensor | None = None
        self.position_scores: Tensor | None = None

    def fold(self) -> None:
        """Fuse the three projections and fold ``u`` into the query's bias."""
        parts = (self.linear_q, self.linear_k, self.linear_v)
        weights = [part.weight for part in parts if part is not None]
        biases = [_bias(part) for part in parts if part is not None]
        if self.relative:
            biases[0] = biases[0] + self.pos_bias_u.reshape(-1)
        self.qkv = Linear.from_weights(torch.cat(weights), torch.cat(biases))
        self.linear_q = self.linear_k = self.linear_v = None

    def set_positions(self, sinusoids: Tensor) -> None:
        """Project ``sinusoids`` ``(positions, dim)`` float32 to this layer's keys and scores."""
        if not self.relative:
            return
        weight = self.linear_pos.weight
        keys = F.linear(sinusoids, weight.float()).view(-1, self.heads, self.head_dim)
        bias = (keys * (self.pos_bias_v - self.pos_bias_u).float()).sum(-1)
        self.position_keys = keys.to(weight.dtype)
        self.position_bias = bias
        self.position_scores = (bias * self.head_dim**-0.5).t().contiguous()

    def forward(self, x: Tensor, residual: Tensor, layout: Layout) -> Tensor:
        """``residual + attention(x)``, ``(batch, frames, dim)``."""
        assert self.qkv is not None  # prepare() ran
        projected = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
        query, key, value = projected.unbind(2)
        context = layout.attend(self, query, key, value)
        return self.linear_out.add_to(residual, context.reshape(x.shape))


class _PositionProjection(nn.Module):
    """Weights of ``linear_pos``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)


def _bias(layer: Linear) -> Tensor:
    """The layer's bias, zeros where it has none."""
    if layer.bias is None:
        return layer.weight.new_zeros(layer.out_features)
    return layer.bias
