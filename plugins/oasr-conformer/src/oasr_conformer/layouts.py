"""How the rows of a batch lie in memory, and what attention and convolution see across them.

A layer computes on ``(batch, frames, dim)`` and asks its layout for the two operations that mix frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from oasr_core.models.layers import MASKED, attention, length_bias

if TYPE_CHECKING:
    from oasr_conformer.attention import SelfAttention
    from oasr_conformer.convolution import ConvolutionModule
    from oasr_core.models.base import CohortState


class Layout(Protocol):
    """The operations of a layer that depend on the layout."""

    def attend(self, layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of ``layer``; all ``(batch, frames, heads, head_dim)``."""
        ...

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """Depthwise convolution of ``module`` over ``x`` ``(batch, frames, dim)``, with the right frames around it."""
        ...


def chunk_bias(frames: int, chunk: int, device: torch.device) -> Tensor:
    """``(1, 1, frames, frames)``: each frame sees its chunk of ``chunk`` frames and all before it."""
    index = torch.arange(frames, device=device) // chunk
    ahead = index > index.unsqueeze(1)
    return torch.zeros(frames, frames, device=device).masked_fill_(ahead, MASKED)[None, None]


class PaddedLayout:
    """Offline: one row an utterance, padded on the right."""

    def __init__(self, lengths: Tensor, frames: int, *, chunk: int, full: bool) -> None:
        """``frames`` per row of which ``lengths`` ``(batch,)`` are real (``full``: all of them in every row)."""
        self._past = None if full else torch.arange(frames, device=lengths.device) >= lengths.unsqueeze(1)
        self._mask = None if full else length_bias(lengths, frames)
        if chunk:
            bias = chunk_bias(frames, chunk, lengths.device)
            self._mask = bias if self._mask is None else self._mask + bias

    def attend(self, layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`Layout`."""
        bias = self._mask
        if layer.position_keys is not None and layer.position_scores is not None:
            frames = key.shape[1]
            key = key + layer.position_keys[:frames]
            scores = layer.position_scores[None, :, None, :frames]
            bias = scores if bias is None else bias + scores
        return attention(query, key, value, bias=bias)

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        if module.causal:
            assert module.silence is not None
            before = module.silence.expand(x.shape[0], module.kernel - 1, -1)
            return module.depthwise_conv(torch.cat([before, x], dim=1))
        if self._past is not None:
            x = x.masked_fill(self._past.unsqueeze(-1), 0.0)
        return module.depthwise_conv(x, padding=(module.kernel - 1) // 2)


class PackedLayout:
    """Offline: all utterances one after another in a single row, without padding."""

    def __init__(self, lengths: list[int], *, chunk: int, device: torch.device) -> None:
        self._lengths = lengths
        self._chunk = chunk
        self._device = device
        self._masks: dict[int, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def attend(self, layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`Layout`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start = 0
        for length in self._lengths:
            rows = slice(start, start + length)
            out[:, rows] = self._segment(layer, query[:, rows], key[:, rows], value[:, rows])
            start += length
        return out

    def _segment(self, layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention within one utterance."""
        frames = key.shape[1]
        bias = self._chunk_mask(frames)
        if layer.position_keys is not None and layer.position_scores is not None:
            key = key + layer.position_keys[:frames]
            scores = layer.position_scores[None, :, None, :frames]
            bias = scores if bias is None else bias + scores
        return attention(query, key, value, bias=bias)

    def _chunk_mask(self, frames: int) -> Tensor | None:
        if not self._chunk:
            return None
        if frames not in self._masks:
            self._masks[frames] = chunk_bias(frames, self._chunk, self._device)
        return self._masks[frames]

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        assert module.silence is not None
        gap = module.kernel - 1
        before = gap if module.causal else gap // 2
        places = self._row_places(gap)
        spread = module.silence.repeat(1, x.shape[1] + gap * len(self._lengths), 1)
        spread.index_copy_(1, places + before, x)
        if not module.causal:
            spread = torch.nn.functional.pad(spread, (0, 0, 0, gap))
        return module.depthwise_conv(spread).index_select(1, places)

    def _row_places(self, gap: int) -> Tensor:
        """Index of each packed row where every utterance is preceded or followed by ``gap`` rows, ``(rows,)``."""
        if gap not in self._places:
            lengths = torch.tensor(self._lengths, device=self._device)
            shift = torch.arange(len(self._lengths), device=self._device).repeat_interleave(lengths)
            self._places[gap] = torch.arange(len(shift), device=self._device) + shift * gap
        return self._places[gap]


class ChunkLayout:
    """Streaming: one row a stream; attention history and convolution context live in the cohort's state."""

    def __init__(self, state: CohortState, positions: Tensor | slice, fresh: Tensor | None) -> None:
        """``positions`` of the chunk's frames; ``fresh`` ``(batch, 1, 1)`` bool marks streams without a past."""
        self._state = state
        self._positions = positions
        self._fresh = fresh

    def attend(self, layer: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`Layout`."""
        bias = None
        if layer.position_keys is not None and layer.position_bias is not None:
            key = key + layer.position_keys[self._positions]
            bias = layer.position_bias[self._positions].expand(*key.shape[:3])
        return self._state.attend(layer.index, query, key, value, key_bias=bias)

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        assert module.silence is not None
        before = self._state.read("conv", module.index)
        if self._fresh is not None:
            before = torch.where(self._fresh, module.silence, before)
        x = torch.cat([before, x], dim=1)
        self._state.write("conv", x[:, x.shape[1] - module.kernel + 1 :], module.index)
        return module.depthwise_conv(x)
