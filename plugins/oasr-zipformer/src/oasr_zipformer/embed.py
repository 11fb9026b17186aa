"""The front-end: feature frames at 100 Hz to frames at 50 Hz."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers import Linear
from oasr_zipformer.activation import CONSTANT, BiasNorm, fold_constant, swoosh
from oasr_zipformer.config import CONVNEXT_REACH, EncoderConfig

# Bytes of the widest intermediate per call on the CPU: what stays in the cache of a core is read back cheaply.
_BLOCK_BYTES = 4 << 20
_KERNEL = 2 * CONVNEXT_REACH + 1


class _Conv(nn.Conv2d):
    """A convolution over channels-last memory."""

    def pack(self) -> None:
        """Lay the weight out as the data lies."""
        weight = self.weight.detach().contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight, requires_grad=False)


class ConvNext(nn.Module):
    """Depthwise convolution over time and frequency, then a feed forward at each point, and a residual sum."""

    __call__: Callable[..., Tensor]

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Padded along frequency here, along time by the caller.
        self.depthwise_conv = _Conv(channels, channels, _KERNEL, groups=channels, padding=(0, CONVNEXT_REACH))
        self.pointwise_conv1: nn.Conv2d | None = nn.Conv2d(channels, 3 * channels, 1)
        self.pointwise_conv2: nn.Conv2d | None = nn.Conv2d(3 * channels, channels, 1)
        self.widen: Linear
        self.narrow: Linear

    def fold(self) -> None:
        """Make the pointwise convolutions linear layers."""
        assert self.pointwise_conv1 is not None
        assert self.pointwise_conv2 is not None
        assert self.pointwise_conv2.bias is not None
        self.widen = Linear.from_weights(self.pointwise_conv1.weight.flatten(1), self.pointwise_conv1.bias)
        self.narrow = Linear.from_weights(self.pointwise_conv2.weight.flatten(1), self.pointwise_conv2.bias)
        self.pointwise_conv1 = self.pointwise_conv2 = None
        fold_constant(self.narrow, "L")

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, frames + 6, width, channels)`` with the frames around to ``(batch, frames, width, channels)``."""
        inner = x[:, CONVNEXT_REACH : x.shape[1] - CONVNEXT_REACH]
        y = self.depthwise_conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.narrow.add_to(inner.contiguous(), swoosh(self.widen(y), "L"))


class Conv2dSubsampling(nn.Module):
    """Three convolutions, ConvNeXt, a projection and its norm.

    The convolutions pad nothing along time, so that a row of ``T`` feature frames has ``(T - 7) // 2`` frames that
    depend on nothing else; ConvNeXt looks at three frames to either side, which are zero outside of an utterance.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        first, second, third = config.embed_channels
        self.width = config.embed_width
        self.channels = third
        self._row_values = max(second * (2 * self.width + 1) * 2, 3 * third * self.width)
        # icefall counts activations and training aids that stand between; only the names keep the count.
        self.conv = nn.ModuleDict(
            {
                "0": _Conv(1, first, 3, padding=(0, 1)),
                "4": _Conv(first, second, 3, stride=2),
                "7": _Conv(second, third, 3, stride=(1, 2)),
            }
        )
        self.convnext = ConvNext(third)
        self.out = Linear(third * self.width, config.stacks[0].dim)
        self.out_norm = BiasNorm(config.stacks[0].dim)

    def fold(self) -> None:
        """Move activation constants into the layers behind, and bring the projection into the order of the memory."""
        self.convnext.fold()
        fold_constant(cast(nn.Conv2d, self.conv["4"]), "R")
        fold_constant(cast(nn.Conv2d, self.conv["7"]), "R")
        weight = self.out.weight
        folded = weight.view(-1, self.channels, self.width).transpose(1, 2).reshape(weight.shape)
        self.out.weight = nn.Parameter(folded, requires_grad=False)

    def forward(self, features: Tensor, lengths: Tensor | None) -> Tensor:
        """Offline: ``(batch, T, feature_dim)`` to ``(batch, (T - 7) // 2, dim)``.

        ``lengths`` ``(batch,)`` are the rows' front-end frames, ``None`` where all rows are full.
        """
        frames = output_frames(features.shape[1])
        if features.device.type != "cpu":
            return self._around(features, lengths, 0, frames)
        per_call = self._frames_per_call(features)
        step = min(frames, per_call)
        rows = max(per_call // step, 1)
        out = features.new_empty(features.shape[0], frames, self.out.out_features)
        for first in range(0, features.shape[0], rows):
            some = slice(first, first + rows)
            for start in range(0, frames, step):
                end = min(start + step, frames)
                out[some, start:end] = self._around(
                    features[some], None if lengths is None else lengths[some], start, end
                )
        return out

    def chunk(self, features: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Streaming: ``(batch, T, feature_dim)`` to ``(batch, (T - 7) // 2 - 3, dim)``, and what the next chunk needs.

        ``before`` ``(batch, 3, width, channels)`` precedes the window; its last three frames are kept back, since
        ConvNeXt does not see their right side yet.
        """
        rows = features.shape[0]
        if features.device.type == "cpu":
            rows = max(self._frames_per_call(features) // output_frames(features.shape[1]), 1)
        parts = [
            self._chunk(*some) for some in zip(torch.split(features, rows), torch.split(before, rows), strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        out, kept = zip(*parts, strict=True)
        return torch.cat(out), torch.cat(kept)

    def _chunk(self, features: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([before, self.convolve(features)], dim=1)
        frames = x.shape[1] - 2 * CONVNEXT_REACH
        return self.project(x), x[:, frames : frames + CONVNEXT_REACH]

    def _frames_per_call(self, features: Tensor) -> int:
        """Front-end frames whose intermediate results stay in the cache."""
        return max(_BLOCK_BYTES // (self._row_values * features.element_size()), 16)

    def _around(self, features: Tensor, lengths: Tensor | None, start: int, end: int) -> Tensor:
        """Frames ``start`` to ``end``, which need three more on either side where there are any."""
        low, high = max(start - CONVNEXT_REACH, 0), min(end + CONVNEXT_REACH, output_frames(features.shape[1]))
        x = self.convolve(features[:, 2 * low : 2 * high + 7])
        if lengths is not None:
            past = torch.arange(low, high, device=x.device) >= lengths.unsqueeze(1)
            x = x.masked_fill_(past[:, :, None, None], 0.0)
        before, after = CONVNEXT_REACH - (start - low), CONVNEXT_REACH - (high - end)
        return self.project(F.pad(x, (0, 0, 0, 0, before, after)))

    def convolve(self, features: Tensor) -> Tensor:
        """``(batch, T, feature_dim)`` to ``(batch, (T - 7) // 2, width, channels)``."""
        x = features.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        for conv in self.conv.values():
            x = swoosh(conv(x), "R")
        return x.permute(0, 2, 3, 1).sub_(CONSTANT["R"])

    def project(self, x: Tensor) -> Tensor:
        """``(batch, frames + 6, width, channels)`` to ``(batch, frames, dim)``."""
        x = self.convnext(x)
        return cast(Tensor, self.out_norm(self.out(x.flatten(2))))


def output_frames(frames: int) -> int:
    """Front-end frames for ``frames`` feature frames."""
    return max((frames - 7) // 2, 0)
