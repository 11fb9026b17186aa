"""Options of the strategy ``ctc`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oasr_core.decoding.base import StrategyOptions
from oasr_core.errors import ConfigError
from oasr_core.request import Hotwords


class CtcOptions(StrategyOptions):
    """How the frame-wise label posteriors are searched.

    All settings but ``search`` and ``blank_id`` are those of prefix beam search; greedy search refuses them by name.
    """

    search: Literal["beam", "greedy"] = Field(
        default="beam", description="beam: prefix beam search; greedy: the best label of each frame."
    )
    blank_id: int | None = Field(
        default=None, ge=0, description="Must equal the model's blank; None takes the model's."
    )
    beam_size: int = Field(default=10, ge=1, description="Prefixes kept after each frame.")
    blank_threshold: float = Field(
        default=0.98,
        ge=0.0,
        le=1.0,
        description="Frames whose blank posterior reaches this take blank alone; 1: no frame, 0: every frame.",
    )
    first_beam_size: int | None = Field(
        default=None, ge=1, description="Most probable labels considered in a frame (WeNet: beam_size); None: all."
    )
    max_seq_len: int | None = Field(
        default=None, ge=1, description="Cap of tokens; who reaches it ends with finish reason length. None: no cap."
    )
    hotwords: Hotwords = Field(default=(), description="Phrases that every request prefers, before its own.")
    hotword_boost: float = Field(
        default=1.5, allow_inf_nan=False, description="Boost for each token of a phrase that names none."
    )
    strict_hotwords: bool = Field(default=False, description="Refuse phrases that cannot be encoded.")

    def check(self, blank_id: int) -> None:
        """Raise ``ConfigError`` for what cannot be honoured; ``blank_id`` is the model's."""
        if self.blank_id is not None and self.blank_id != blank_id:
            raise ConfigError(
                f"Decode option blank_id={self.blank_id} of strategy 'ctc': the model's blank is {blank_id}; "
                f"leave blank_id unset or give {blank_id}."
            )
        if self.search == "beam":
            return
        for name in type(self).model_fields:
            unserved = name in self.model_fields_set - {"search", "blank_id"}
            if unserved and (name, getattr(self, name)) != ("beam_size", 1):
                raise ConfigError(
                    f"Decode option {name}={getattr(self, name)!r} of strategy 'ctc' is one of prefix beam search and "
                    f"search is 'greedy'; leave {name} unset or set search='beam'."
                )
