"""Windows that end at the quietest point near the end of what fits."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from oasr_core.segmenters.base import Window
from oasr_core.segmenters.energy import quietest
from oasr_core.segmenters.gate import GatedSegmenter


class QuietOptions(BaseModel):
    """Options of the segmenter ``quiet``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    search_seconds: float = Field(
        5.0, gt=0.0, allow_inf_nan=False, description="Audio before a window's limit in which the cut is looked for."
    )


class QuietSegmenter(GatedSegmenter):
    """Consecutive windows over the whole waveform, cut where it is quietest.

    At most a third of a window is searched. The last window is not shorter than what is searched, so that no sliver is
    left for the model to guess at.
    """

    oasr_api = "1.0"
    options_cls: ClassVar[type[BaseModel]] = QuietOptions
    options: QuietOptions

    def cut(self, waveform: Tensor, max_samples: int) -> list[Window]:
        """Windows that touch and share nothing."""
        samples = int(waveform.shape[0])
        search = max(min(round(self.options.search_seconds * self.sample_rate), max_samples // 3), 1)
        windows: list[Window] = []
        start = 0
        while samples - start > max_samples:
            limit = max(min(start + max_samples, samples - search), start + 1)
            seam = quietest(waveform, max(limit - search, start), limit, self.sample_rate)
            windows.append(Window(start, seam))
            start = seam
        if start < samples:
            windows.append(Window(start, samples))
        return windows
