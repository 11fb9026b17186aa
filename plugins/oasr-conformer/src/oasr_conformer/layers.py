"""Encoder layers, written once for every layout of rows in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from oasr_conformer.attention import SelfAttention
from oasr_conformer.convolution import ConvolutionModule
from oasr_core.models.layers import Activation, LayerNorm, Linear

if TYPE_CHECKING:
    from oasr_conformer.config import EncoderConfig
    from oasr_conformer.layouts import Layout

# Rows of a feed forward at a time on a single core.
_ROWS = 256


class FeedForward(nn.Module):
    """``w_2(activation(w_1(x)))``."""

    __call__: Callable[..., Tensor]

    def __init__(self, dim: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.w_1 = Linear(dim, hidden, activation=activation)
        self.w_2 = Linear(hidden, dim)

    def fold(self, scale: float) -> None:
        """Fold the factor of the residual sum into the second layer."""
        # Not in place: the weights may be shared with the checkpoint or mapped from its file.
        self.w_2.weight = nn.Parameter(self.w_2.weight.detach() * scale, requires_grad=False)
        self.w_2.bias = nn.Parameter(self.w_2.bias.detach() * scale, requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + feed_forward(x)``, all ``(batch, frames, dim)``."""
        if x.device.type != "cpu" or torch.get_num_threads() > 1:
            return self.w_2.add_to(residual, self.w_1(x))
        # On one core the hidden layer is kept within its cache; several cores do better with all rows at once.
        out = torch.empty_like(x)
        flat, rest, into = x.flatten(0, 1), residual.flatten(0, 1), out.flatten(0, 1)
        for start in range(0, len(flat), _ROWS):
            rows = slice(start, start + _ROWS)
            into[rows] = self.w_2.add_to(rest[rows], self.w_1(flat[rows]))
        return out


class ConformerLayer(nn.Module):
    """Half feed forward (macaron), self-attention, convolution module, half feed forward, final norm; all pre-norm."""

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        dim, eps = config.output_size, config.norm_eps
        self.self_attn = SelfAttention(config, index)
        self.norm_mha = LayerNorm(dim, eps=eps)
        self.feed_forward = FeedForward(dim, config.linear_units, config.activation)
        self.norm_ff = LayerNorm(dim, eps=eps)
        self.feed_forward_macaron: FeedForward | None = None
        if config.macaron:
            self.feed_forward_macaron = FeedForward(dim, config.linear_units, config.activation)
            self.norm_ff_macaron = LayerNorm(dim, eps=eps)
        self.conv_module: ConvolutionModule | None = None
        if config.conv_module:
            self.conv_module = ConvolutionModule(config, index)
            self.norm_conv = LayerNorm(dim, eps=eps)
            self.norm_final = LayerNorm(dim, eps=eps)

    def fold(self) -> None:
        """Fold what is constant once the weights are known."""
        self.self_attn.fold()
        if self.feed_forward_macaron is not None:
            self.feed_forward_macaron.fold(0.5)
            self.feed_forward.fold(0.5)
        if self.conv_module is not None:
            self.conv_module.fold()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        if self.feed_forward_macaron is not None:
            x = self.feed_forward_macaron(self.norm_ff_macaron(x), x)
        x = self.self_attn(self.norm_mha(x), x, layout)
        if self.conv_module is not None:
            x = self.conv_module(self.norm_conv(x), x, layout)
        x = self.feed_forward(self.norm_ff(x), x)
        return x if self.conv_module is None else self.norm_final(x)


class TransformerLayer(nn.Module):
    """Self-attention and feed forward, pre-norm."""

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, index)
        self.norm1 = LayerNorm(config.output_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.output_size, config.linear_units, config.activation)
        self.norm2 = LayerNorm(config.output_size, eps=config.norm_eps)

    def fold(self) -> None:
        """Fold what is constant once the weights are known."""
        self.self_attn.fold()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        x = self.self_attn(self.norm1(x), x, layout)
        return self.feed_forward(self.norm2(x), x)
