"""The slot streaming backend: encoders whose whole streaming state has fixed extent."""

from __future__ import annotations

from typing import ClassVar

from oasr_core.streaming.paged import PagedBackend


class SlotBackend(PagedBackend):
    """The same step over slots alone: without a ``PagedKV`` among its specs, the store holds no blocks.

    A slot is filled with its initial value at admission and read and written by row, so the step has fixed shapes
    for a fixed cohort and is ready for capture.
    """

    oasr_api = "1.0"
    kind: ClassVar[str] = "slot"
