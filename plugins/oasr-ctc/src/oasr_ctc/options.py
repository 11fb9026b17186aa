"""Options of the strategy ``ctc`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oasr_core.decoding.base import StrategyOptions
from oasr_core.errors import ConfigError


class CtcOptions(StrategyOptions):
    """How the frame-wise label posteriors are searched.

    The settings of prefix beam search exist, are validated, and are refused by name as long as only greedy search is
    served (:meth:`refuse_unserved`).
    """

    search: Literal["greedy"] = Field(default="greedy", description="Search: the best label of each frame.")
    blank_id: int | None = Field(
        default=None, ge=0, description="Must equal the model's blank; None takes the model's."
    )
    beam_size: int = Field(default=1, ge=1, description="Prefixes kept by prefix beam search; greedy serves only 1.")
    blank_threshold: float | None = Field(
        default=None, ge=0.0, le=1.0, description="Prefix beam search skips frames whose blank posterior reaches this."
    )
    max_seq_len: int | None = Field(default=None, ge=1, description="Cap of emitted tokens of prefix beam search.")

    def refuse_unserved(self, blank_id: int) -> None:
        """Raise ``ConfigError`` for a setting that the search cannot honour; ``blank_id`` is the model's."""
        unserved = {
            "beam_size": self.beam_size if self.beam_size != 1 else None,
            "blank_threshold": self.blank_threshold,
            "max_seq_len": self.max_seq_len,
        }
        for name, value in unserved.items():
            if value is not None:
                allowed = "1" if name == "beam_size" else "unset"
                raise ConfigError(
                    f"Decode option {name}={value} of strategy 'ctc': prefix beam search is not served yet; "
                    f"use greedy (search='greedy', {name}: {allowed})."
                )
        if self.blank_id is not None and self.blank_id != blank_id:
            raise ConfigError(
                f"Decode option blank_id={self.blank_id} of strategy 'ctc': the model's blank is {blank_id}; "
                f"leave blank_id unset or give {blank_id}."
            )
