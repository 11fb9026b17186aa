"""The convolution module, with the chunk-causal depthwise convolution of streaming models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers import DepthwiseConv1d, Linear
from oasr_zipformer.activation import fold_constant, swoosh

if TYPE_CHECKING:
    from oasr_zipformer.config import StackConfig
    from oasr_zipformer.layouts import Layout, RowEnds


class ChunkCausalConv(nn.Module):
    """A causal convolution plus a symmetric one that stays inside of the chunk and is scaled near its two edges.

    An offline utterance is one chunk. There both have zeros around them, so that one filter serves both, and the scale
    is added where it differs from one: over the first frames, and over each row's own last ones.
    """

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.causal_conv = DepthwiseConv1d(dim, (kernel + 1) // 2)
        self.chunkwise_conv = DepthwiseConv1d(dim, kernel)
        self.chunkwise_conv_scale = nn.Parameter(torch.zeros(2, dim, kernel))
        self._edges: Tensor
        self._scales: dict[int, Tensor] = {}

    def fold(self) -> None:
        """Sum the two filters for offline use."""
        causal, chunkwise = self.causal_conv, self.chunkwise_conv
        both = DepthwiseConv1d(len(causal.bias), self.kernel)
        wide = F.pad(causal.weight.detach().float(), (0, self.kernel // 2)) + chunkwise.weight.detach().float()
        bias = causal.bias.detach().float() + chunkwise.bias.detach().float()
        both.weight = nn.Parameter(wide.to(causal.weight.dtype), requires_grad=False)
        both.bias = nn.Parameter(bias.to(causal.bias.dtype), requires_grad=False)
        self.both = both
        self._edges = self.chunkwise_conv_scale.detach().transpose(1, 2).contiguous()  # (2, kernel, dim)

    def whole(self, x: Tensor, ends: RowEnds) -> Tensor:
        """Whole utterances ``(batch, frames, dim)``, zero past their ends."""
        half, kernel = self.kernel // 2, self.kernel
        y = self.both(x, padding=half)
        head = self.chunkwise_conv(x[:, : kernel + half], padding=half)[:, :kernel]
        y[:, :kernel] += head * self._edges[0, : head.shape[1]]
        window = ends.last(kernel, half)
        tail = self.chunkwise_conv(window.take(x)).mul_(self._edges[1])
        return window.add(y, tail)

    def chunk(self, x: Tensor, before: Tensor) -> Tensor:
        """One chunk ``(batch, frames, dim)`` with the ``kernel // 2`` frames before it."""
        causal = self.causal_conv(torch.cat([before, x], dim=1))
        return torch.addcmul(causal, self.chunkwise_conv(x, padding=self.kernel // 2), self._scale(x.shape[1]))

    def _scale(self, frames: int) -> Tensor:
        """``(frames, dim)``: one, plus what either edge adds."""
        if frames not in self._scales:
            left, right = self._edges.float()
            some = min(frames, self.kernel)
            scale = torch.ones(frames, left.shape[1], device=left.device)
            scale[:some] += left[:some]
            scale[frames - some :] += right[self.kernel - some :]
            self._scales[frames] = scale.to(self._edges.dtype)
        return self._scales[frames]


class ConvolutionModule(nn.Module):
    """Gated linear unit, depthwise convolution over time, SwooshR, linear."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: StackConfig, index: int, *, causal: bool) -> None:
        """``index``: whether it is the first (0) or the second (1) of its layer."""
        super().__init__()
        self.index = index
        self.reach = config.half_kernel
        self.in_proj: Linear | None = Linear(config.dim, 2 * config.dim)
        self.depthwise_conv: ChunkCausalConv | DepthwiseConv1d = (ChunkCausalConv if causal else DepthwiseConv1d)(
            config.dim, config.conv_kernel
        )
        self.out_proj = Linear(config.dim, config.dim)
        self.value: Linear
        self.gate: Linear

    def fold(self) -> None:
        """Split the gated layer in value and gate; move the activation's constant."""
        assert self.in_proj is not None
        value, gate = self.in_proj.weight.chunk(2)
        value_bias, gate_bias = self.in_proj.bias.chunk(2)
        self.value = Linear.from_weights(value, value_bias)
        self.gate = Linear.from_weights(gate, gate_bias, activation="sigmoid")
        self.in_proj = None
        if isinstance(self.depthwise_conv, ChunkCausalConv):
            self.depthwise_conv.fold()
        fold_constant(self.out_proj, "R")

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``x + module(x)``, ``(batch, frames, dim)``."""
        y = layout.convolve(self, self.value.multiply(self.gate(x), x))
        return self.out_proj.add_to(x, swoosh(y, "R"))
