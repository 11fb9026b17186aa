"""Settings of the executors (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ExecutorOptions(BaseModel):
    """How the step loop overlaps host and device work."""

    offline_decode_overlap: bool = Field(True, description="Collect a queued decode read-back on the next tick.")
    offline_collate_prefetch: bool = Field(True, description="Stage the next micro-batch behind the current one.")
    gc_freeze: bool = Field(True, description="Freeze the Python heap after construction.")
    max_pinned_audio_seconds: float = Field(300.0, ge=0, description="Page-locked audio per request, seconds.")
    max_pinned_audio_total_seconds: float = Field(3600.0, ge=0, description="Page-locked audio in all, seconds.")
