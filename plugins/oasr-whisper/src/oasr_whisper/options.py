"""Options of the strategy ``aed`` (torch-free)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from oasr_core.decoding.base import StrategyOptions
from oasr_core.decoding.options import AutoregressiveOptions


class AedOptions(AutoregressiveOptions):
    """How Whisper decodes.

    A result is silence where the no-speech probability lies over ``no_speech_threshold`` and the average log
    probability of its tokens does not exceed ``log_prob_threshold``. With ``temperature_fallback`` a result that is too
    repetitive or too improbable, and not silence, is decoded again at the next of these temperatures.
    """

    max_new_tokens: int = Field(224, ge=1, description="Cap of generated tokens, unless the request says otherwise.")
    timestamps: bool = Field(False, description="Generate timestamp tokens, which cut the text into timed segments.")
    temperature_fallback: tuple[Annotated[float, Field(gt=0.0, le=100.0)], ...] = Field(
        (), description="Rising temperatures to try after the request's own; faster-whisper: 0.2 to 1.0 by 0.2."
    )
    best_of: int = Field(5, ge=1, le=64, description="Draws at a fallback temperature; the best by score is taken.")
    compression_ratio_threshold: float | None = Field(
        2.4, gt=0.0, description="A text that zlib shrinks by more than this is too repetitive. None: any will do."
    )
    log_prob_threshold: float | None = Field(
        -1.0, allow_inf_nan=False, description="Average log probability below which a result is too improbable."
    )
    no_speech_threshold: float | None = Field(
        0.6, ge=0.0, le=1.0, description="No-speech probability above which an improbable result is silence."
    )
    no_speech_gate: bool = Field(True, description="Give an empty transcript for silence.")
    suppress_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="Ids that are never generated. None: the checkpoint's list."
    )
    suppress_blank: bool = Field(True, description="Never begin with what the checkpoint forbids there: blank, end.")
    max_initial_timestamp: float | None = Field(
        None, ge=0.0, le=30.0, description="Latest first timestamp in seconds. None: the checkpoint's, commonly 1.0."
    )

    @model_validator(mode="after")
    def _rises(self) -> AedOptions:
        if list(self.temperature_fallback) != sorted(set(self.temperature_fallback)):
            raise ValueError(f"temperature_fallback must rise, got {self.temperature_fallback}")
        return self


class AedRequestOptions(StrategyOptions):
    """What a single request may say in ``DecodingOptions.extra``."""

    timestamps: bool | None = Field(
        None, description="Overrides the strategy's option timestamps, unless segment_timestamps asks for them."
    )
