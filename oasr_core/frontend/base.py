"""The contract of the ``oasr.frontends`` axis. A frontend owns the frame grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor

from oasr_core.options import validated


class StreamingFraming(ABC):
    """Where frames lie, in samples: the one declaration that offline and streaming extraction share."""

    #: Samples that one frame spans.
    span: int
    #: Samples between frames.
    hop: int

    @abstractmethod
    def frames(self, samples: int, *, final: bool) -> int:
        """Frames that can be computed from the first ``samples`` samples; ``final`` when no more will come."""

    @abstractmethod
    def start(self, frame: int) -> int:
        """First sample of ``frame``; negative (or past the end) where the signal is mirrored."""


class FeatureFrontend(ABC):
    """Waveforms in, feature frames out.

    ``waveforms`` are ``(batch, samples)`` float32 in [-1, 1], ``lengths`` ``(batch,)`` int64 samples; what lies beyond
    a row's length may be anything and must not change its features.
    """

    #: Class of the settings that ``FeatureSpec.options`` and ``EngineConfig.feature_config`` hold.
    options_cls: ClassVar[type[BaseModel]]

    def __init__(self, options: BaseModel, audio_scale: float) -> None:
        self.options = options
        self.audio_scale = audio_scale

    @classmethod
    def from_options(cls, options: Mapping[str, object], audio_scale: float) -> FeatureFrontend:
        """Validate ``options`` against :attr:`options_cls` (:class:`ConfigError` names each bad one) and build."""
        return cls(validated(cls.options_cls, options, cls.__name__), audio_scale)

    @property
    @abstractmethod
    def sample_rate(self) -> int:
        """Hz."""

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Width of a frame (after stacking)."""

    @property
    @abstractmethod
    def frame_seconds(self) -> float:
        """Seconds between frames (after stacking)."""

    @property
    def window_seconds(self) -> float | None:
        """Fixed window that every utterance is padded to, or ``None``."""
        return None

    @abstractmethod
    def num_frames(self, samples: int) -> int:
        """Exact number of frames of an utterance of ``samples`` samples."""

    @abstractmethod
    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``(batch, frames, feature_dim)`` float32 and ``(batch,)`` int64 frame counts.

        Frames beyond a row's count are zero. A frontend with a fixed window (:attr:`window_seconds`) returns whole
        windows instead, and what fills them is part of what its models were trained on.
        """

    #: How frames lie over samples, or ``None`` where features need the whole utterance (no streaming).
    framing: StreamingFraming | None = None

    def compute_frames(self, frames: Tensor) -> Tensor:
        """Features of raw frames, with ``framing``: ``(n, span)`` float32 in [-1, 1] to ``(n, feature_dim)``."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def to(self, device: torch.device) -> FeatureFrontend:
        """Move constant tables to ``device``."""
        return self
