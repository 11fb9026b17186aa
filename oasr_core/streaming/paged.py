"""The paged streaming backend: growing attention history in the shared block pool, and slots beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from oasr_core.cache.attention import IntArray
from oasr_core.models.base import CohortState
from oasr_core.streaming.cohort import CohortBackend


class PagedBackend(CohortBackend):
    """Blocks for the whole cohort are prepared in one call of the store."""

    oasr_api = "1.0"
    kind: ClassVar[str] = "paged"

    def cohort_state(self, stream_ids: Sequence[str], offsets: IntArray, counts: IntArray, frames: int) -> CohortState:
        """Block tables and slots of the cohort."""
        return self.store.cohort(stream_ids, offsets, counts, frames)
