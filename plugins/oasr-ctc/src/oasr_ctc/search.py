"""What the strategy ``ctc`` delegates to: one search, for whole batches and for all streams of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from oasr_core.decoding.base import Hypotheses, Mode, Session
from oasr_core.request import DecodingOptions


class Search(ABC):
    """Finds hypotheses in frame-wise log posteriors; every stream's state is in its session."""

    @abstractmethod
    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Raise ``RequestRefusedError`` for request options that this search cannot honour."""

    @abstractmethod
    def open(self, options: DecodingOptions) -> Session:
        """Begin a stream."""

    @abstractmethod
    def advance(self, sessions: Sequence[Session], log_probs: Tensor, lengths: Tensor) -> None:
        """Advance ``sessions`` by the ``lengths`` ``(batch,)`` frames of ``log_probs`` ``(batch, frames, vocab)``.

        Raises :class:`~oasr_ctc.greedy.InvalidLogProbsError` before any session has changed.
        """

    @abstractmethod
    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """The cumulative hypotheses of the sessions; their lists may be the sessions' own and grow in place."""

    def close(self, session: Session) -> None:  # noqa: B027 - an optional hook
        """Release what a stream holds."""
