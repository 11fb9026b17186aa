"""How the rows of a batch lie in memory, and what attention and convolution see across frames.

A layer computes on ``(batch, frames, dim)`` at the rate of its stack and asks its layout for what mixes frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from oasr_core.models.layers import MASKED, DepthwiseConv1d, length_bias
from oasr_zipformer.attention import history_parts

if TYPE_CHECKING:
    from oasr_core.models.base import CohortState
    from oasr_zipformer.config import StackConfig
    from oasr_zipformer.convolution import ConvolutionModule


class Layout(Protocol):
    """The operations of a layer that depend on the layout."""

    #: Frames of this call, padding included.
    frames: int
    #: Added to the scores of all heads and queries, ``(batch, 1, keys)``; ``None`` where every key counts.
    mask: Tensor | None

    def begin(self, layer: int) -> None:
        """A layer of the stack starts."""
        ...

    def extend(self, part: str, x: Tensor) -> Tensor:
        """The frames ``x`` ``(batch, frames, n)``, behind those that earlier chunks left for ``part``."""
        ...

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """Depthwise convolution of ``module`` over ``x`` ``(batch, frames, dim)``, with the right frames around it."""
        ...

    def end(self, layer: int) -> None:
        """The layer is done."""
        ...


@dataclass(frozen=True)
class Window:
    """The last ``kernel`` frames of every row with ``half`` frames around: indexes into the frames of a batch."""

    index: Tensor  # (batch, kernel + 2 half), inside of the batch's frames
    inside: Tensor  # (batch, kernel + 2 half, 1): whether such a frame exists
    target: Tensor  # (batch, kernel)
    target_inside: Tensor  # (batch, kernel, 1)

    def take(self, x: Tensor) -> Tensor:
        """``(batch, kernel + 2 half, dim)`` of ``x`` ``(batch, frames, dim)``, zero outside of a row."""
        picked = x.gather(1, self.index.unsqueeze(2).expand(-1, -1, x.shape[2]))
        return picked.masked_fill_(~self.inside, 0.0)

    def add(self, y: Tensor, values: Tensor) -> Tensor:
        """Add ``values`` ``(batch, kernel, dim)`` to the last frames of the rows of ``y``, in place."""
        values = values.masked_fill_(~self.target_inside, 0.0)
        return y.scatter_add_(1, self.target.unsqueeze(2).expand(-1, -1, y.shape[2]), values)


class RowEnds:
    """Where the rows of a padded batch end, at one frame rate."""

    def __init__(self, lengths: Tensor, frames: int, *, full: bool) -> None:
        """``frames`` per row of which ``lengths`` ``(batch,)`` are real (``full``: all of them in every row)."""
        self.lengths = lengths
        self.frames = frames
        self.past = None if full else (torch.arange(frames, device=lengths.device) >= lengths.unsqueeze(1))[:, :, None]
        self._windows: dict[int, Window] = {}

    def last(self, kernel: int, half: int) -> Window:
        """The last ``kernel`` frames of each row; ``half`` follows from ``kernel``."""
        if kernel not in self._windows:
            lengths = self.lengths.unsqueeze(1)
            around = lengths - kernel - half + torch.arange(kernel + 2 * half, device=lengths.device)
            target = around[:, half : half + kernel]
            self._windows[kernel] = Window(
                index=around.clamp(0, self.frames - 1),
                inside=((around >= 0) & (around < lengths)).unsqueeze(2),
                target=target.clamp(min=0),
                target_inside=(target >= 0).unsqueeze(2),
            )
        return self._windows[kernel]

    def silence(self, x: Tensor) -> Tensor:
        """``x`` ``(batch, frames, dim)`` with zeros past the rows' ends."""
        return x if self.past is None else x.masked_fill(self.past, 0.0)

    def hold(self, x: Tensor) -> Tensor:
        """``x`` with each row's last frame repeated past its end."""
        if self.past is None:
            return x
        index = (self.lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[2])
        return torch.where(self.past, x.gather(1, index), x)


class PaddedLayout:
    """Offline: one utterance a row, padded on the right; nothing of a row depends on its padding."""

    def __init__(self, ends: RowEnds, dtype: torch.dtype) -> None:
        self.ends = ends
        self.frames = ends.frames
        self.mask = None if ends.past is None else length_bias(ends.lengths, ends.frames).squeeze(1).to(dtype)

    def begin(self, layer: int) -> None:
        """See :class:`Layout`."""

    def extend(self, part: str, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        return x

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        x = self.ends.silence(x)
        if isinstance(module.depthwise_conv, DepthwiseConv1d):
            return module.depthwise_conv(x, padding=module.reach)
        return module.depthwise_conv.whole(x, self.ends)

    def end(self, layer: int) -> None:
        """See :class:`Layout`."""


class ChunkLayout:
    """Streaming: one chunk of each stream; keys and values of the left context, and what precedes a convolution."""

    def __init__(
        self, state: CohortState, stack: int, config: StackConfig, *, frames: int, left: int, mask: Tensor | None
    ) -> None:
        """``frames`` and ``left`` context frames at the stack's rate, ``mask`` ``(batch, 1, left + frames)``."""
        self.frames = frames
        self.mask = mask
        self._state = state
        self._left = left
        self._attention, self._convolution = slot_names(stack)
        self._places: dict[str, tuple[int, int]] = {}
        start = 0
        for part, width in history_parts(config).items():
            self._places[part] = (start, width)
            start += width
        self._history: Tensor
        self._before: Tensor
        self._after: list[Tensor] = []

    def begin(self, layer: int) -> None:
        """See :class:`Layout`."""
        kept = self._state.read(self._attention, layer)
        self._history = kept.new_empty(kept.shape[0], self._left + self.frames, kept.shape[2])
        self._history[:, : self._left] = kept
        self._before = self._state.read(self._convolution, layer)
        self._after = []

    def extend(self, part: str, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        start, width = self._places[part]
        history = self._history[:, :, start : start + width]
        history[:, self._left :] = x
        return history

    def convolve(self, module: ConvolutionModule, x: Tensor) -> Tensor:
        """See :class:`Layout`."""
        if isinstance(module.depthwise_conv, DepthwiseConv1d):
            raise RuntimeError("a symmetric convolution cannot stream")
        before = self._before[:, module.index]
        self._after.append(torch.cat([before, x], dim=1)[:, x.shape[1] :])
        return module.depthwise_conv.chunk(x, before)

    def end(self, layer: int) -> None:
        """See :class:`Layout`."""
        self._state.write(self._attention, self._history[:, self.frames :], layer)
        self._state.write(self._convolution, torch.stack(self._after, dim=1), layer)


def slot_names(stack: int) -> tuple[str, str]:
    """Names of a stack's two slots: attention history, and frames before the convolutions."""
    return f"stack{stack}.attention", f"stack{stack}.convolution"


def context_mask(offsets: Tensor, left: int, chunk: int, downsampling: int, dtype: torch.dtype) -> Tensor:
    """``(batch, 1, keys)``: hides left context that a young stream does not have.

    ``offsets`` ``(batch,)``, ``left`` and ``chunk`` in front-end frames; keys at the stack's rate.
    """
    frame = torch.arange(0, left + chunk, downsampling, device=offsets.device)
    missing = frame < (left - offsets).unsqueeze(1)
    mask = torch.zeros(missing.shape, device=offsets.device).masked_fill_(missing, MASKED)
    return mask.unsqueeze(1).to(dtype)
