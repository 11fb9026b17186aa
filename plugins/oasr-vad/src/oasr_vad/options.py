"""Options of the segmenter ``vad`` (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VadOptions(BaseModel):
    """What counts as speech. Defaults are those of silero-vad's ``get_speech_timestamps``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(0.5, gt=0.0, lt=1.0, description="Probability from which on speech begins.")
    neg_threshold: float | None = Field(
        None, gt=0.0, lt=1.0, description="Probability below which it may end; unset: threshold - 0.15, at least 0.01."
    )
    min_speech_seconds: float = Field(0.25, ge=0.0, allow_inf_nan=False, description="Shorter speech is dropped.")
    min_silence_seconds: float = Field(0.1, ge=0.0, allow_inf_nan=False, description="Shorter silence ends nothing.")
    speech_pad_seconds: float = Field(
        0.03, ge=0.0, allow_inf_nan=False, description="Audio added on both sides of speech, where no other is near."
    )

    @property
    def end_threshold(self) -> float:
        """:attr:`neg_threshold`, or what it is derived to."""
        return max(self.threshold - 0.15, 0.01) if self.neg_threshold is None else self.neg_threshold

    @model_validator(mode="after")
    def _in_order(self) -> VadOptions:
        if self.neg_threshold is not None and self.neg_threshold > self.threshold:
            raise ValueError(f"neg_threshold={self.neg_threshold:g} is above threshold={self.threshold:g}")
        return self
