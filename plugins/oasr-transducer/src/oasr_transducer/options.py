"""Options of the strategy ``transducer`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oasr_core.decoding.base import StrategyOptions
from oasr_core.errors import ConfigError
from oasr_core.request import Hotwords


class TransducerOptions(StrategyOptions):
    """How the outputs of the joint network are searched.

    Greedy search refuses the settings of beam search by name, and beam search the one of greedy search.
    """

    search: Literal["greedy", "beam"] = Field(
        default="greedy", description="greedy: the best label at each point; beam: modified beam search."
    )
    beam_size: int = Field(default=4, ge=1, description="Hypotheses kept after each frame (beam search).")
    max_sym_per_frame: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that one frame emits (greedy search; beam search: 1). None: as the model was trained.",
    )
    blank_penalty: float = Field(
        default=0.0, allow_inf_nan=False, description="Subtracted from the blank's logit; positive: fewer deletions."
    )
    hotwords: Hotwords = Field(default=(), description="Phrases that every request prefers (beam search).")
    hotword_boost: float = Field(
        default=1.5, allow_inf_nan=False, description="Boost for each token of a phrase that names none."
    )
    strict_hotwords: bool = Field(default=False, description="Refuse phrases that cannot be encoded.")

    def check(self, durations: tuple[int, ...] | None) -> None:
        """Raise ``ConfigError`` for what cannot be honoured; ``durations`` are the model's."""
        if self.search == "greedy":
            self._check_greedy()
            return
        if durations is not None:
            raise ConfigError(
                f"Decode option search='beam' of strategy 'transducer': the model predicts durations {durations}, and "
                "beam search takes one frame at a time; set search='greedy'."
            )
        if self.max_sym_per_frame not in (None, 1):
            raise ConfigError(
                f"Decode option max_sym_per_frame={self.max_sym_per_frame} of strategy 'transducer': modified beam "
                "search emits at most one token a frame; leave it unset or set search='greedy'."
            )

    def _check_greedy(self) -> None:
        for name in ("beam_size", "hotwords", "hotword_boost", "strict_hotwords"):
            if name in self.model_fields_set and (name, getattr(self, name)) != ("beam_size", 1):
                raise ConfigError(
                    f"Decode option {name}={getattr(self, name)!r} of strategy 'transducer' is one of beam search and "
                    f"search is 'greedy'; leave {name} unset or set search='beam'."
                )
