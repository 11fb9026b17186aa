"""Settings of graph capture (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class GraphOptions(BaseModel):
    """What may be captured, at which shapes. On the CPU nothing is captured."""

    use_cuda_graphs: bool = Field(True, description="Capture the steady-state streaming forward; master gate.")
    graph_backend: str = Field("auto", description="A name on the graph_backends axis; auto: by device.")
    streaming_graph_cache_growth: float = Field(1.5, ge=1, description="Growth of the cached-length ladder.")
    streaming_graph_batch_ladder: list[int] | None = Field(None, description="Batch widths of streaming graphs.")
    streaming_graph_pad_batch: bool | None = Field(None, description="Pad a cohort to the next ladder width.")
    streaming_graph_max_shapes: int = Field(512, ge=1, description="Ceiling of pre-warmed and live captures.")
    use_offline_cuda_graphs: bool = Field(True, description="Capture the offline forward by batch and length bucket.")
    offline_graph_batch_buckets: list[int] | None = Field(None, description="Batch widths to capture offline.")
    offline_graph_frame_granularity: int = Field(64, ge=1, description="Rounding of the time axis, feature frames.")
    offline_graph_max_frames: int = Field(4096, ge=1, description="No capture past this padded width.")
    offline_graph_max_captures: int = Field(64, ge=1, description="Live offline captures.")
    feature_graph_batch_buckets: list[int] | None = Field(None, description="Batch widths of feature graphs.")
