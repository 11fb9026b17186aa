"""Convolutional subsampling: feature frames to encoder frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from oasr_core.models.layers import Conv2d, LayerNorm, Linear

# Bytes of the first convolution's output per call on the CPU: what stays in the cache of a core is read back cheaply.
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Stride:
    """One convolution along time and frequency."""

    kernel: int
    stride: int

    def after(self, length: int) -> int:
        """Output length for an input of ``length``."""
        return max((length - self.kernel) // self.stride + 1, 0) if length >= self.kernel else 0


#: Input layer -> its convolutions. The one that WeNet calls ``conv2d`` reduces time by 4, the others by what they say.
STRIDES: dict[str, tuple[Stride, ...]] = {
    "linear": (),
    "conv2d": (Stride(3, 2), Stride(3, 2)),
    "conv2d6": (Stride(3, 2), Stride(5, 3)),
    "conv2d8": (Stride(3, 2), Stride(3, 2), Stride(3, 2)),
}


class Subsampling(nn.Module):
    """``(batch, frames, input_dim)`` to ``(batch, frames', output_size)``; no padding, so frames are independent.

    Parameter names are WeNet's: ``conv.{0,2,..}`` and ``out.0`` (``conv2d``, ``linear``) or ``linear``.
    """

    def __init__(self, input_layer: str, input_dim: int, output_size: int) -> None:
        super().__init__()
        self.strides = STRIDES[input_layer]
        self.rate = 1
        self.context = 1  # feature frames that one encoder frame sees
        for stride in self.strides:
            self.context += (stride.kernel - 1) * self.rate
            self.rate *= stride.stride
        self._channels = output_size
        self._rows_per_frame = input_dim
        if not self.strides:
            self.out = nn.ModuleList([Linear(input_dim, output_size), LayerNorm(output_size, eps=1e-5)])
            return
        width = input_dim
        steps: list[nn.Module] = []
        for index, stride in enumerate(self.strides):
            # WeNet counts the activations that stand between; they are fused here, and only the names keep the count.
            steps += [nn.Identity()] if index else []
            channels = output_size if index else 1
            steps.append(Conv2d(channels, output_size, stride.kernel, stride.stride, activation="relu"))
            width = stride.after(width)
            self._rows_per_frame = self._rows_per_frame if index else width
        self.conv = nn.ModuleList(steps)
        self._width = width
        if input_layer == "conv2d":
            self.out = nn.ModuleList([Linear(output_size * width, output_size)])
        else:
            self.linear = Linear(output_size * width, output_size)

    @property
    def projection(self) -> Linear:
        """The linear layer behind the convolutions."""
        return cast(Linear, self.linear if hasattr(self, "linear") else self.out[0])

    def fold(self) -> None:
        """Reorder the projection's columns from channel-major to frequency-major, as channels-last memory lies."""
        if not self.strides:
            return
        weight = self.projection.weight
        folded = weight.view(-1, self._channels, self._width).transpose(1, 2).reshape(weight.shape)
        self.projection.weight = nn.Parameter(folded, requires_grad=False)

    def output_frames(self, frames: int) -> int:
        """Encoder frames for ``frames`` feature frames."""
        for stride in self.strides:
            frames = stride.after(frames)
        return frames

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """:meth:`output_frames` for a tensor of lengths."""
        for stride in self.strides:
            lengths = torch.div(lengths - stride.kernel, stride.stride, rounding_mode="floor") + 1
        return lengths.clamp(min=0)

    def forward(self, features: Tensor) -> Tensor:
        """Subsample; call after :meth:`fold`."""
        if not self.strides:
            return cast(Tensor, self.out[1](self.out[0](features)))
        frames = self.output_frames(features.shape[1])
        if features.device.type != "cpu":
            return self._blocks(features)
        return self._blocked(features, frames)

    def _blocks(self, features: Tensor) -> Tensor:
        """All frames of ``features`` in one call."""
        x = features.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        for step in self.conv:
            x = step(x)
        x = x.permute(0, 2, 3, 1)  # (batch, frames, width, channels): the order of the folded projection
        return cast(Tensor, self.projection(x.reshape(*x.shape[:2], -1)))

    def _blocked(self, features: Tensor, frames: int) -> Tensor:
        """As :meth:`_blocks`, in pieces of time and batch that stay in the cache."""
        row = self._rows_per_frame * self._channels * features.element_size() * self.rate // self.strides[0].stride
        per_call = max(_BLOCK_BYTES // row, 16)
        step = min(frames, per_call)
        rows = max(per_call // step, 1)
        out = features.new_empty(features.shape[0], frames, self._channels)
        for first in range(0, features.shape[0], rows):
            for start in range(0, frames, step):
                end = min(start + step, frames)
                window = features[first : first + rows, start * self.rate : (end - 1) * self.rate + self.context]
                out[first : first + rows, start:end] = self._blocks(window)
        return out
