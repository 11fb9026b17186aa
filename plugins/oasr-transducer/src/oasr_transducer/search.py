"""What the strategy ``transducer`` delegates to: one search, for whole batches and for all streams of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from oasr_core.decoding.base import Hypotheses, Mode, Session
from oasr_core.request import DecodingOptions


class Search(ABC):
    """Finds hypotheses in encoder outputs; every stream's state is in its session and in the pool's rows."""

    @abstractmethod
    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Raise ``RequestRefusedError`` for request options that this search cannot honour."""

    @abstractmethod
    def open(self, options: DecodingOptions) -> Session:
        """Begin a stream."""

    @abstractmethod
    def advance(self, sessions: Sequence[Session], hidden: Tensor, lengths: Sequence[int], *, keep: bool) -> None:
        """Advance each session by the frames in ``lengths`` of its row of ``hidden`` ``(batch, frames, dim)``.

        Without ``keep`` nothing can follow. Raises :class:`~oasr_transducer.errors.InvalidLogitsError` before any
        session has changed.
        """

    @abstractmethod
    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """The cumulative hypotheses of the sessions; their lists may be the sessions' own and grow in place."""

    @abstractmethod
    def close(self, session: Session) -> None:
        """Release what a stream holds."""
