"""Where Kaldi's frames lie over samples, and raw frames cut from a waveform (or from a part of it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasr_core.frontend.base import StreamingFraming


@dataclass(frozen=True)
class SnipEdgesFraming(StreamingFraming):
    """Only whole windows: frame ``t`` is samples ``[t * hop, t * hop + span)`` (Kaldi, ``snip_edges=true``)."""

    span: int
    hop: int

    def frames(self, samples: int, *, final: bool) -> int:
        """Whole windows in ``samples`` samples; the end of the audio adds none."""
        return 0 if samples < self.span else 1 + (samples - self.span) // self.hop

    def start(self, frame: int) -> int:
        """First sample of ``frame``."""
        return frame * self.hop


@dataclass(frozen=True)
class CentredFraming(StreamingFraming):
    """Frames centred on their shift, the signal mirrored at both ends (Kaldi, ``snip_edges=false``)."""

    span: int
    hop: int

    def frames(self, samples: int, *, final: bool) -> int:
        """One frame for each shift, halves rounded up; before the end only those that need no mirrored right edge."""
        total = (samples + self.hop // 2) // self.hop
        if final:
            return total
        whole = (samples - self.span - self.start(0)) // self.hop + 1
        return max(0, min(total, whole))

    def start(self, frame: int) -> int:
        """First sample of ``frame``, negative for the first frames when the window is longer than the shift."""
        return frame * self.hop + self.hop // 2 - self.span // 2


def cut_frames(
    samples: Tensor, framing: StreamingFraming, first: int, count: int, *, total: int | None = None, base: int = 0
) -> Tensor:
    """Raw frames ``first .. first + count`` of an utterance: ``(count, span)``, a view where no edge is mirrored.

    ``samples`` is 1-D and holds the utterance from sample ``base`` on; ``total`` is the utterance's length in samples
    (default: what ``samples`` ends at). A position outside ``[0, total)`` is reflected at the ends until it is inside,
    the end sample itself included, as in Kaldi's ``ExtractWindow``.
    """
    total = base + samples.shape[0] if total is None else total
    if count <= 0:
        return samples.new_empty(0, framing.span)
    begin = framing.start(first)
    end = framing.start(first + count - 1) + framing.span
    if begin >= 0 and end <= total:
        return samples[begin - base : end - base].unfold(0, framing.span, framing.hop)
    position = torch.arange(begin, end, device=samples.device) % (2 * total)
    position = torch.where(position < total, position, 2 * total - 1 - position)
    return samples[position - base].unfold(0, framing.span, framing.hop)


def compute_in_blocks(
    compute: Callable[[Tensor], Tensor], rows: Sequence[Tensor], width: int, *, device: torch.device, block: int
) -> Tensor:
    """``compute`` over the frames of all ``rows`` together, at most ``block`` frames at a time.

    ``rows`` are ``(n_i, span)`` raw frames; the result is ``(sum n_i, width)`` on ``device``, rows one after another.
    The blocks bound the memory of the intermediate results whatever the length of the audio.
    """
    out = torch.empty(sum(row.shape[0] for row in rows), width, dtype=torch.float32, device=device)
    done = 0
    for pieces in _blocks(rows, block):
        frames = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        out[done : done + frames.shape[0]] = compute(frames.to(device))
        done += frames.shape[0]
    return out


def _blocks(rows: Sequence[Tensor], block: int) -> Iterator[list[Tensor]]:
    """Cut ``rows`` and group the pieces so that each group has ``block`` frames, the last one what is left."""
    pieces: list[Tensor] = []
    room = block
    for row in rows:
        start = 0
        while start < row.shape[0]:
            piece = row[start : start + room]
            pieces.append(piece)
            start += piece.shape[0]
            room -= piece.shape[0]
            if room == 0:
                yield pieces
                pieces, room = [], block
    if pieces:
        yield pieces
