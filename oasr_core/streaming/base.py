"""The contract of the ``oasr.streaming_backends`` axis, keyed by ``encoder.streaming_kind``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oasr_core.cache.store import StreamStateStore
from oasr_core.models.base import BaseEncoder, ChunkGeometry, EncoderOutput


@dataclass(frozen=True)
class StreamChunk:
    """One stream's part of a step: ``features`` ``(frames, dim)``, at most a window; ``offset`` encoder frames so
    far.
    """

    stream_id: str
    features: Tensor
    offset: int


class StreamingEncoderBackend(ABC):
    """Drives the streaming forward of one encoder; the store owns the memory."""

    #: The ``streaming_kind`` that it drives.
    kind: ClassVar[str]

    def __init__(
        self,
        encoder: BaseEncoder,
        geometry: ChunkGeometry,
        store: StreamStateStore,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pad_final: bool = True,
    ) -> None:
        self.encoder = encoder
        self.geometry = geometry
        self.store = store
        self.device = device
        self.dtype = dtype
        self.pad_final = pad_final

    def open(self, stream_id: str) -> None:
        """Give a stream its state."""
        self.store.allocate(stream_id)

    def close(self, stream_id: str) -> None:
        """Take it back."""
        self.store.free(stream_id)

    def step_frames(self, feature_frames: int) -> int:
        """Encoder frames that a window with ``feature_frames`` real frames gives."""
        if self.geometry.fills_final:
            return self.geometry.output_frames
        return self.encoder.output_frames(feature_frames)

    def at_capacity(self, offset: int, feature_frames: int) -> bool:
        """Whether the stream cannot take a window of ``feature_frames`` more (asked before dispatch)."""
        frames = self.step_frames(feature_frames)
        limit = self.encoder.max_positions
        return (limit is not None and offset + frames > limit) or self.store.at_capacity(offset, frames)

    @abstractmethod
    def forward_step(self, chunks: Sequence[StreamChunk]) -> EncoderOutput:
        """One forward of the whole cohort; row ``i`` of the result belongs to ``chunks[i]``."""
