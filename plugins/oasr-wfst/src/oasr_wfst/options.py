"""Options of the strategy ``ctc_wfst`` (torch-free)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from oasr_core.decoding.base import StrategyOptions


class CtcWfstOptions(StrategyOptions):
    """Which graph is searched, and how. Beams are differences of log scores."""

    fst_path: Path | None = Field(
        default=None, description="Required. The graph: an image of `oasr wfst build`, k2's HLG.pt, or OpenFst."
    )
    words: Path | None = Field(
        default=None, description="words.txt of a graph that carries no words; the words of an image need none."
    )
    tokens: Path | None = Field(default=None, description="tokens.txt of a graph in OpenFst's text form with symbols.")
    label_offset: int | None = Field(
        default=None, description="What the graph's input labels exceed token ids by; None: by the format's custom."
    )
    search_beam: float = Field(
        default=20.0, gt=0, description="Paths this much worse than a frame's best are dropped; inf: none is."
    )
    output_beam: float = Field(
        default=8.0, gt=0, description="Arcs this much worse than the best path are left out of lattices and n-best."
    )
    min_active_states: int = Field(default=30, ge=0, description="With fewer active states the beam widens.")
    max_active_states: int = Field(default=10000, ge=1, description="With more active states the beam narrows (soft).")
    allow_partial: bool = Field(
        default=True,
        description="Give the best path although the graph does not accept its end; else no words at all then.",
    )
    blank_threshold: float = Field(
        default=0.98,
        gt=0.0,
        le=1.0,
        description="In a run of frames with a higher blank posterior only the first is searched; 1: all are.",
    )
    word_separator: str = Field(
        default=" ", description="Between words in the text; empty for languages written without spaces."
    )
    backend: Literal["auto", "cpu", "triton"] = Field(
        default="auto",
        description="cpu: compiled code on the processor; triton: on the GPU; auto: where the model runs.",
    )

    @model_validator(mode="after")
    def _check_active(self) -> CtcWfstOptions:
        if self.min_active_states >= self.max_active_states:
            raise ValueError(
                f"min_active_states={self.min_active_states} must be below max_active_states={self.max_active_states}."
            )
        return self
