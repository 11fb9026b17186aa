"""One encoder layer, written once for every layout of rows in memory, and stacks of them at their own frame rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from oasr_core.models.layers import Linear
from oasr_zipformer.activation import BiasNorm, Bypass, fold_constant, swoosh
from oasr_zipformer.attention import AttentionWeights, NonlinAttention, SelfAttention
from oasr_zipformer.convolution import ConvolutionModule

if TYPE_CHECKING:
    from oasr_zipformer.config import StackConfig
    from oasr_zipformer.layouts import Layout

# Rows of a feed forward at a time on a single core.
_ROWS = 256


class FeedForward(nn.Module):
    """``x + out_proj(SwooshL(in_proj(x)))``."""

    __call__: Callable[..., Tensor]

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.in_proj = Linear(dim, hidden)
        self.out_proj = Linear(hidden, dim)

    def fold(self) -> None:
        """Move the activation's constant."""
        fold_constant(self.out_proj, "L")

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        if x.device.type != "cpu" or torch.get_num_threads() > 1:
            return self._rows(x)
        # On one core the hidden layer is kept within its cache; several cores do better with all rows at once.
        out = torch.empty_like(x)
        flat, into = x.flatten(0, 1), out.flatten(0, 1)
        for start in range(0, len(flat), _ROWS):
            into[start : start + _ROWS] = self._rows(flat[start : start + _ROWS])
        return out

    def _rows(self, x: Tensor) -> Tensor:
        return self.out_proj.add_to(x, swoosh(self.in_proj(x), "L"))


class ZipformerLayer(nn.Module):
    """Feed forward, non-linear attention, attention, convolution, feed forward, and the last three once more."""

    def __init__(self, config: StackConfig, pos_dim: int, *, causal: bool) -> None:
        super().__init__()
        dim, wide = config.dim, config.feedforward_dim
        self.self_attn_weights = AttentionWeights(config, pos_dim)
        self.self_attn1 = SelfAttention(config, 0)
        self.self_attn2 = SelfAttention(config, 1)
        self.feed_forward1 = FeedForward(dim, wide * 3 // 4)
        self.feed_forward2 = FeedForward(dim, wide)
        self.feed_forward3 = FeedForward(dim, wide * 5 // 4)
        self.nonlin_attention = NonlinAttention(config)
        self.conv_module1 = ConvolutionModule(config, 0, causal=causal)
        self.conv_module2 = ConvolutionModule(config, 1, causal=causal)
        self.norm = BiasNorm(dim)
        self.bypass = Bypass(dim)
        self.bypass_mid = Bypass(dim)

    def fold(self) -> None:
        """Fold what is constant once the weights are known."""
        for part in (self.feed_forward1, self.feed_forward2, self.feed_forward3):
            part.fold()
        for module in (self.nonlin_attention, self.conv_module1, self.conv_module2):
            module.fold()

    def forward(self, before: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        weights = self.self_attn_weights(before, layout)
        x = self.feed_forward1(before)
        x = self.nonlin_attention(x, weights, layout)
        x = self.self_attn1(x, weights, layout)
        x = self.conv_module1(x, layout)
        x = self.feed_forward2(x)
        x = self.bypass_mid(before, x)
        x = self.self_attn2(x, weights, layout)
        x = self.conv_module2(x, layout)
        x = self.feed_forward3(x)
        out: Tensor = self.bypass(before, self.norm(x))
        return out


class Stack(nn.Module):
    """Layers at the front-end's rate."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: StackConfig, pos_dim: int, *, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ZipformerLayer(config, pos_dim, causal=causal) for _ in range(config.num_layers))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        for index, layer in enumerate(self.layers):
            layout.begin(index)
            x = layer(x, layout)
            layout.end(index)
        return x


class Downsample(nn.Module):
    """Weighted sum over groups of frames."""

    __call__: Callable[..., Tensor]

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(factor))
        self._weights: Tensor | None = None

    def pack(self) -> None:
        """Normalise the weights once."""
        self._weights = self.bias.detach().float().softmax(0).to(self.bias.dtype)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to ``(batch, frames / factor, dim)``; the caller fills up a last group."""
        assert self._weights is not None  # prepare() ran
        grouped = x.view(x.shape[0], -1, len(self._weights), x.shape[2])
        return (grouped * self._weights).sum(2)


class DownsampledStack(nn.Module):
    """Layers at a lower rate, repeated back to the front-end's and mixed with what came in."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: StackConfig, pos_dim: int, *, causal: bool) -> None:
        super().__init__()
        self.downsample = Downsample(config.downsampling)
        self.encoder = Stack(config, pos_dim, causal=causal)
        self.out_combiner = Bypass(config.dim)

    def forward(self, x: Tensor, held: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to the same; ``held`` is ``x`` with each row's last frame repeated past its end."""
        y = self.encoder(self.downsample(held), layout)
        mixed: Tensor = self.out_combiner(x.view(*y.shape[:2], -1, y.shape[2]), y.unsqueeze(2))
        return mixed.flatten(1, 2)
