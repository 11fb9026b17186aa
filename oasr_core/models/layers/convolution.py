"""Convolutions over channels-last memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers.activation import Activation, activate
from oasr_core.models.layers.packing import onednn_serves

#: oneDNN's bf16 depthwise kernel does not return for 16 channels and some widths; so few are computed in fp32.
_BF16_MIN_CHANNELS = 32


class Conv2d(nn.Conv2d):
    """Two-dimensional convolution without padding, with fused activation.

    Input and output are ``(batch, channels, rows, columns)`` in channels-last memory. Like
    :class:`~oasr_core.models.layers.Linear`, packing gives up :attr:`weight`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, *, activation: Activation = "none"
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride)
        self.activation: Activation = activation
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Reorder the weight for the fused CPU kernel; where that kernel is missing, keep the plain form."""
        if self._packed is not None:
            return
        weight = self.weight.detach().contiguous(memory_format=torch.channels_last)
        if not onednn_serves(weight, "_convolution_pointwise"):
            self.weight = nn.Parameter(weight, requires_grad=False)
            return
        stride = list(self.stride)
        self._packed = torch._C._nn.mkldnn_reorder_conv2d_weight(weight.to_mkldnn(), [0, 0], stride, [1, 1], 1)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, in, rows, columns)`` to ``(batch, out, rows', columns')``."""
        if self._packed is None:
            return activate(F.conv2d(x, self.weight, self.bias, self.stride), self.activation)
        variant = "none" if self.activation == "gelu" else ""
        out = torch.ops.mkldnn._convolution_pointwise(
            x, self._packed, self.bias, [0, 0], list(self.stride), [1, 1], 1, self.activation, [], variant
        )
        return cast(Tensor, out)


class DepthwiseConv1d(nn.Module):
    """One filter per channel along time, on ``(batch, frames, channels)`` without transposes or padding.

    ``weight`` ``(channels, 1, kernel)`` and ``bias`` ``(channels,)``, as ``torch.nn.Conv1d`` names them.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor, *, padding: int = 0) -> Tensor:
        """``(batch, frames, channels)`` to ``(batch, frames + 2 padding - kernel + 1, channels)``, contiguous."""
        # As a picture of one row whose pixels are frames, the layout in memory is channels-last: no copy is made.
        image = x.unsqueeze(1).permute(0, 3, 1, 2)
        weight: Tensor = self.weight.unsqueeze(2)
        bias: Tensor = self.bias
        if x.dtype == torch.bfloat16 and x.shape[-1] < _BF16_MIN_CHANNELS:
            image, weight, bias = image.float(), weight.float(), bias.float()
        out = F.conv2d(image, weight, bias, padding=(0, padding), groups=x.shape[-1]).to(x.dtype)
        return out.permute(0, 2, 3, 1).squeeze(1)
