"""The Conformer's convolution module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from oasr_core.models.layers import DepthwiseConv1d, LayerNorm, Linear, activate

if TYPE_CHECKING:
    from oasr_conformer.config import EncoderConfig
    from oasr_conformer.layouts import Layout


class _Pointwise(nn.Module):
    """Weights of a convolution of width 1, as the checkpoint holds them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 1))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)


class _BatchNorm(nn.Module):
    """Weights of a batch normalisation that runs on its training statistics."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))


class ConvolutionModule(nn.Module):
    """Pointwise, gated linear unit, depthwise over time, norm, activation, pointwise.

    A causal module of WeNet puts its zeros (or the cached frames) *before* the first pointwise layer, whose bias
    and gate turn them into the constant :attr:`silence` ``(dim,)``; that constant is what precedes an utterance in
    the depthwise convolution. A symmetric module has true zeros there.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        dim = config.output_size
        self.index = index
        self.kernel = config.conv_kernel
        self.causal = config.conv_causal
        self.activation = config.activation
        self.pointwise_conv1: _Pointwise | None = _Pointwise(dim, 2 * dim)
        self.depthwise_conv = DepthwiseConv1d(dim, config.conv_kernel)
        self.norm: LayerNorm | _BatchNorm | None = (
            LayerNorm(dim, eps=config.conv_norm_eps)
            if config.conv_norm == "layer_norm"
            else _BatchNorm(dim, config.conv_norm_eps)
        )
        self.pointwise_conv2: _Pointwise | None = _Pointwise(dim, dim)
        self.silence: Tensor | None = None

    def fold(self) -> None:
        """Split the gated layer in value and gate, make both pointwise layers linear, absorb a batch norm."""
        assert self.pointwise_conv1 is not None
        assert self.pointwise_conv2 is not None
        value, gate = self.pointwise_conv1.weight.squeeze(-1).chunk(2)
        value_bias, gate_bias = self.pointwise_conv1.bias.chunk(2)
        self.value = Linear.from_weights(value, value_bias)
        self.gate = Linear.from_weights(gate, gate_bias, activation="sigmoid")
        self.out = Linear.from_weights(self.pointwise_conv2.weight.squeeze(-1), self.pointwise_conv2.bias)
        silence = value_bias * gate_bias.sigmoid() if self.causal else torch.zeros_like(value_bias)
        self.silence = silence.detach()
        self.pointwise_conv1 = self.pointwise_conv2 = None
        if isinstance(self.norm, _BatchNorm):
            self._absorb(self.norm)
            self.norm = None

    def _absorb(self, norm: _BatchNorm) -> None:
        """Scale and shift the depthwise filters as ``norm`` would their output."""
        conv = self.depthwise_conv
        scale = norm.weight.float() * torch.rsqrt(norm.running_var.float() + norm.eps)
        bias = (conv.bias.float() - norm.running_mean.float()) * scale + norm.bias.float()
        weight = conv.weight.float() * scale[:, None, None]
        conv.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
        conv.bias = nn.Parameter(bias.to(conv.bias.dtype), requires_grad=False)

    def gated(self, x: Tensor) -> Tensor:
        """What the depthwise convolution sees of ``x``: ``(batch, frames, dim)`` both."""
        return self.value.multiply(self.gate(x), x)

    def forward(self, x: Tensor, residual: Tensor, layout: Layout) -> Tensor:
        """``residual + module(x)``, ``(batch, frames, dim)``."""
        y = layout.convolve(self, self.gated(x))
        if self.norm is not None:
            y = self.norm(y)
        return self.out.add_to(residual, activate(y, self.activation))
