"""Settings of the paged KV cache and of capacity sizing (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CacheOptions(BaseModel):
    """What the streaming state store reads. Frames are encoder output frames."""

    max_num_blocks: int | None = Field(None, ge=1, description="Physical blocks in the pool; None derives it.")
    block_size_frames: int = Field(16, ge=1, description="Frames per block; follows chunk_size unless set.")
    max_blocks_per_seq: int = Field(512, ge=1, description="Block-table width: a stream's ceiling in blocks.")
    use_paged_cache: bool = Field(True, description="False keeps dense per-stream histories; equal results.")
    recycle_streaming_history: bool = Field(
        False, description="At the ceiling drop the oldest block instead of finishing with length."
    )
    gpu_memory_utilization: float = Field(0.90, gt=0, le=1, description="Share of the GPU that the engine may occupy.")
    cpu_memory_utilization: float = Field(
        0.50, gt=0, le=1, description="Share of RAM that a derived pool may reserve on the CPU (lazily committed)."
    )
