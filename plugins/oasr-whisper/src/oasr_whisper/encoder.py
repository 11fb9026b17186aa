"""Whisper's encoder: two convolutions over a window of fixed length, then pre-norm transformer layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.errors import InvalidAudioError
from oasr_core.models.base import BaseEncoder, EncoderBatch, EncoderOutput
from oasr_core.models.layers import LayerNorm, Linear
from oasr_whisper.config import SUBSAMPLING, WhisperConfig

#: Epsilon of every normalisation.
NORM_EPS = 1e-5


class FrameConvolution(Linear):
    """Convolution of kernel 3 and padding 1 over time, then GELU, on ``(batch, frames, channels)``.

    It is one matrix product over gathered frames: the weight is ``(out, 3 * in)``, the three frames side by side.
    """

    kernel = 3

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(self.kernel * in_channels, out_channels, activation="gelu")
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, frames, in)`` to ``(batch, frames / stride, out)``; ``stride`` divides ``frames``."""
        batch, frames, channels = x.shape
        padded = F.pad(x, (0, 0, 1, 1))
        size = (batch, frames // self.stride, self.kernel * channels)
        strides = (padded.stride(0), self.stride * channels, 1)
        return super().forward(padded.as_strided(size, strides).contiguous())


class EncoderLayer(nn.Module):
    """Self-attention over the whole window, then feed forward; queries, keys and values are one projection."""

    __call__: Callable[..., Tensor]

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_norm = LayerNorm(dim, eps=NORM_EPS)
        self.self_qkv = Linear(dim, 3 * dim)
        self.self_out = Linear(dim, dim)
        self.ffn_norm = LayerNorm(dim, eps=NORM_EPS)
        self.ffn_in = Linear(dim, ffn_dim, activation="gelu")
        self.ffn_out = Linear(ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to the same."""
        batch, frames, dim = x.shape
        qkv = self.self_qkv(self.self_norm(x)).view(batch, frames, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = self.self_out.add_to(x, context.reshape(batch, frames, dim))
        return self.ffn_out.add_to(x, self.ffn_in(self.ffn_norm(x)))


class WhisperEncoder(BaseEncoder):
    """Computes every window over all its frames, as the model was trained; ``lengths`` only tell what is content.

    The frames behind an utterance are what the frontend made of the padding, and they take part.
    """

    subsampling_rate = SUBSAMPLING
    streaming_kind = "none"

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.feature_dim = config.n_mels
        self.output_dim = config.dim
        self.max_positions = config.max_source_positions
        self.window_frames = config.window_frames
        self.conv1 = FrameConvolution(config.n_mels, config.dim, stride=1)
        self.conv2 = FrameConvolution(config.dim, config.dim, stride=SUBSAMPLING)
        self.positions = nn.Parameter(torch.zeros(config.max_source_positions, config.dim))
        self.layers = nn.ModuleList(
            EncoderLayer(config.dim, config.encoder_heads, config.encoder_ffn_dim) for _ in range(config.encoder_layers)
        )
        self.norm = LayerNorm(config.dim, eps=NORM_EPS)

    def output_frames(self, feature_frames: int) -> int:
        """Half as many encoder frames, rounded up."""
        return -(-feature_frames // SUBSAMPLING)

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        """``features`` ``(batch, window_frames, n_mels)``, padding as the frontend made it.

        ``hidden`` holds all frames of the window, ``lengths`` those of the content. Raises ``InvalidAudioError`` for
        features of another extent.
        """
        _, frames, width = batch.features.shape
        if (frames, width) != (self.window_frames, self.feature_dim):
            raise InvalidAudioError(
                f"Whisper's encoder got features of {frames} frames x {width} bins; this checkpoint takes windows of "
                f"exactly {self.window_frames} x {self.feature_dim}. The frontend 'whisper_logmel' pads to them."
            )
        # One window fills the processor; several at once would only push each other out of its caches.
        parts = torch.split(batch.features, 1) if batch.features.device.type == "cpu" else (batch.features,)
        hidden = [self._encode(part.to(self.positions.dtype)) for part in parts]
        whole = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return EncoderOutput(whole, (batch.lengths + 1) // SUBSAMPLING)

    def _encode(self, features: Tensor) -> Tensor:
        x = self.conv2(self.conv1(features)).add_(self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
