"""Settings of streaming chunking (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class StreamingOptions(BaseModel):
    """How streams are cut and ended."""

    chunk_size: int = Field(16, ge=1, description="Encoder output frames per chunk; unset: the checkpoint's.")
    num_left_chunks: int = Field(-1, ge=-1, description="Past chunks that attention sees; -1 is unlimited.")
    finalize_silence_pad: bool = Field(
        True, description="Pad a short last window to full size (masked where the encoder can); False runs it short."
    )
    partial_decode_interval: int = Field(1, description="Emit a partial every n-th chunk; 0 or less: none.")
    hold_unstable_partials: bool = Field(False, description="Show in partials only what is never taken back.")
    streaming_feature_lookahead: bool = Field(True, description="Compute the next features behind the forward.")
    overlap_partial_readback: bool = Field(False, description="Read partials back one chunk late.")
