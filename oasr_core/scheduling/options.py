"""Settings of admission, batching and partition (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BatchingOptions(BaseModel):
    """What the scheduler reads. Lengths are feature frames unless said otherwise."""

    max_batch_size: int = Field(32, ge=1, description="Encoder batch width; in streaming it caps the running streams.")
    preferred_batch_size: list[int] | None = Field(None, description="Snap batches to one of these sizes.")
    schedule_policy: str = Field("window", description="Batching policy: a name on the batching_policies axis.")
    partition_policy: str = Field("auto", description="How a batch is cut; auto: from the partition settings.")
    length_window_factor: int = Field(4, ge=1, description="window policy: choose from max_batch_size x factor oldest.")
    length_bucket_ratio: float = Field(0.0, ge=0, le=1, description="Floor of shortest/longest in a batch; 0 is off.")
    max_offline_pad_ratio: float = Field(4.0, ge=0, description="Cap of padded/useful frames in a batch; 0 is off.")
    max_batch_frames: int | None = Field(None, ge=1, description="Cap of longest x batch, in feature frames.")
    max_wait_time: float = Field(0.2, ge=0, description="Seconds after which a waiting request goes first.")
    streaming_cohort_admit: bool = Field(True, description="Length-sort waiting streams before admission.")
    enable_sequence_packing: bool = Field(False, description="Offline: one gapless row instead of a padded batch.")
    max_packed_frames: int = Field(8192, ge=1, description="Encoder frames of one packed row.")
    overlap_admit: bool = Field(False, description="Offline: prepare admissions on a daemon thread.")
