"""The features of one stream: audio that waits for a whole frame, and frames that wait for the encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_core.errors import InvalidAudioError, RequestRefusedError, StreamClosedError
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.frontend.framing import cut_frames

# Rows that the cursor must have left behind before the rest is moved to a buffer of its own.
_DROP_ROWS = 256


class FeatureStream:
    """Samples in, raw frames out to the (batched) computation, features back in, windows out to the encoder.

    Frames are counted from the start of the utterance. Only the samples that later frames need are kept, and only the
    frames from the cursor on. Not thread-safe; the engine's lock covers it.
    """

    def __init__(self, frontend: FeatureFrontend) -> None:
        if frontend.framing is None:
            raise RequestRefusedError(
                f"{type(frontend).__name__} needs the whole utterance (stacked frames or a fixed window); "
                f"it cannot stream: send the request with streaming=False"
            )
        self._framing = frontend.framing
        self._feature_dim = frontend.feature_dim
        self._pieces: list[Tensor] = []
        self._base = 0
        self._received = 0
        self._finished = False
        self._audio_frames = 0
        # Rows [_head, _tail) of the buffer are the frames from the cursor on. Rows once written never change, so a
        # view that the caller still holds stays valid.
        self._buffer = torch.empty(0, self._feature_dim)
        self._head = 0
        self._tail = 0
        self._cursor = 0

    @property
    def samples_received(self) -> int:
        """Samples appended so far."""
        return self._received

    @property
    def finished(self) -> bool:
        """Whether no more audio will come."""
        return self._finished

    @property
    def frames_computed(self) -> int:
        """Frames accepted so far, those appended in the feature domain included."""
        return self._cursor + self.frames_ready

    @property
    def frames_ready(self) -> int:
        """Frames from the cursor on."""
        return self._tail - self._head

    @property
    def frames_pending(self) -> int:
        """Frames that the received audio allows and that have not been accepted."""
        return self._framing.frames(self._received, final=self._finished) - self._audio_frames

    @property
    def cursor(self) -> int:
        """Frame at which the next window starts."""
        return self._cursor

    def append(self, samples: Tensor) -> None:
        """Queue ``samples``: 1-D float32 on the CPU, in [-1, 1]. The stream keeps the tensor; don't change it."""
        if self._finished:
            raise StreamClosedError("audio was appended to a feature stream that has been finished")
        if samples.dim() != 1 or samples.dtype != torch.float32 or samples.device.type != "cpu":
            raise InvalidAudioError(
                f"a feature stream takes 1-D float32 samples on the CPU, got {tuple(samples.shape)} {samples.dtype} on "
                f"{samples.device}; InputProcessor.prepare_waveform makes them"
            )
        if samples.shape[0]:
            self._pieces.append(samples)
            self._received += samples.shape[0]

    def finish(self) -> None:
        """Say that no more audio comes; the frames at the right edge become pending."""
        self._finished = True

    def pending_frames(self) -> Tensor:
        """Raw frames ``(n, span)`` that can be computed now and have not been accepted, mirrored at the edges."""
        count = self.frames_pending
        if count <= 0:
            return torch.empty(0, self._framing.span)
        return cut_frames(
            self._joined(), self._framing, self._audio_frames, count, total=self._received, base=self._base
        )

    def accept(self, features: Tensor) -> None:
        """Take the features ``(n, feature_dim)`` of the first ``n`` pending frames; drop samples not needed again."""
        count = features.shape[0]
        if count > self.frames_pending:
            raise ValueError(f"{count} frames accepted, but only {self.frames_pending} are pending")
        if count == 0:
            return
        self._store(features)
        self._audio_frames += count
        # The mirrored right edge reaches back to the middle of the next frame, one sample of rounding aside.
        keep = min(max(self._base, self._framing.start(self._audio_frames) - 1), self._received)
        if self._finished and self.frames_pending == 0:
            keep = self._received
        self._pieces = [self._joined()[keep - self._base :].clone()]
        self._base = keep

    def append_frames(self, features: Tensor) -> None:
        """Add flush frames ``(n, feature_dim)`` after the last frame of the finished audio."""
        if not self._finished or self.frames_pending:
            raise ValueError("frames can be appended only after finish() and after all pending frames are accepted")
        self._store(features)

    def window(self, frames: int) -> Tensor:
        """Up to ``frames`` frames from the cursor on: ``(n, feature_dim)``, a view that stays valid."""
        return self._buffer[self._head : min(self._head + frames, self._tail)]

    def advance(self, stride: int) -> None:
        """Move the cursor by ``stride`` frames; at the end of a stream it stops behind the last frame."""
        if stride > self.frames_ready:
            if not self._finished or self.frames_pending:
                raise ValueError(f"the cursor cannot advance by {stride} frames, {self.frames_ready} are ready")
            stride = self.frames_ready
        self._head += stride
        self._cursor += stride
        if self._head == self._tail or self._head >= max(_DROP_ROWS, self.frames_ready):
            self._move_rows(self.frames_ready)

    def _joined(self) -> Tensor:
        """The kept samples as one tensor."""
        if len(self._pieces) != 1:
            self._pieces = [torch.cat(self._pieces) if self._pieces else torch.empty(0)]
        return self._pieces[0]

    def _store(self, features: Tensor) -> None:
        count = features.shape[0]
        if self._tail + count > self._buffer.shape[0] or self._buffer.device != features.device:
            self._move_rows(2 * (self.frames_ready + count), features.device)
        self._buffer[self._tail : self._tail + count] = features
        self._tail += count

    def _move_rows(self, capacity: int, device: torch.device | None = None) -> None:
        """Move the rows from the cursor on to the front of a new buffer of ``capacity`` rows."""
        rows = self._buffer[self._head : self._tail]
        self._buffer = torch.empty(capacity, self._feature_dim, device=device or rows.device)
        self._buffer[: rows.shape[0]] = rows
        self._head, self._tail = 0, rows.shape[0]
