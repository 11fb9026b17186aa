"""Windows that share audio: no pause is looked for, and what both recognize is merged afterwards."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from oasr_core.errors import ConfigError
from oasr_core.segmenters.base import Window
from oasr_core.segmenters.gate import GatedSegmenter


class OverlapOptions(BaseModel):
    """Options of the segmenter ``overlap``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    overlap_seconds: float = Field(
        1.0, ge=0.0, allow_inf_nan=False, description="Audio that neighbouring windows share, at most half of a window."
    )


class OverlapSegmenter(GatedSegmenter):
    """As few windows as there can be, of equal length, each sharing its head with the tail of the one before."""

    oasr_api = "1.0"
    options_cls: ClassVar[type[BaseModel]] = OverlapOptions
    shares_audio = True
    options: OverlapOptions

    def cut(self, waveform: Tensor, max_samples: int) -> list[Window]:
        """Windows over the whole waveform; ``ConfigError`` where the overlap is more than half of a window."""
        overlap = round(self.options.overlap_seconds * self.sample_rate)
        if 2 * overlap > max_samples:
            raise ConfigError(
                f"overlap_seconds={self.options.overlap_seconds:g} is more than half of a window of "
                f"{max_samples / self.sample_rate:g} s; give at most {max_samples / 2 / self.sample_rate:g}."
            )
        fresh = int(waveform.shape[0]) - overlap  # samples that windows would have to bring if none overlapped
        count = -(-fresh // (max_samples - overlap)) if fresh > 0 else 1
        seams = [fresh * index // count for index in range(count + 1)]
        return [
            Window(start, end + overlap, overlap if index else 0) for index, (start, end) in enumerate(pairwise(seams))
        ]
