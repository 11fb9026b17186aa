"""The incremental protocol: decode families that generate step by step, under a budget per engine step.

The engine calls :meth:`IncrementalStrategy.begin_offline` with a micro-batch's encoder output and then
:meth:`~IncrementalStrategy.advance` once a tick until nothing is pending. A strategy keeps the state of its requests
between the calls and gives memory back as each of them ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from oasr_core.decoding.base import Consumes, DecodeStrategy, Hypotheses, Mode
from oasr_core.decoding.budget import StepBudget

if TYPE_CHECKING:
    from oasr_core.models.base import EncoderOutput
    from oasr_core.request import DecodingOptions

#: Decoder steps that :meth:`IncrementalStrategy.decode_offline` runs before it looks again; it has no deadline.
_STEPS = 1024


@dataclass(frozen=True)
class IncrementalRequest:
    """One request as an incremental strategy sees it."""

    request_id: str
    options: DecodingOptions


@dataclass
class Progress:
    """What :meth:`IncrementalStrategy.advance` has to tell of one request.

    Cumulative ``hypotheses``, the last ones where ``finished``; or an ``error``, which ends the request.
    """

    request_id: str
    hypotheses: Hypotheses | None = None
    finished: bool = False
    error: Exception | None = None


class IncrementalStrategy(DecodeStrategy):
    """A decode family whose requests stay in the engine while their tokens are generated."""

    modes: ClassVar[tuple[Mode, ...]] = ("offline",)
    consumes: ClassVar[Consumes] = "hidden"

    def reserve(self, request: IncrementalRequest) -> bool:
        """Set memory aside for the largest that a request can become; ``False`` where it is not free now.

        What is reserved is released when the request ends, fails or is cancelled.
        """
        return True

    @abstractmethod
    def begin_offline(self, out: EncoderOutput, requests: Sequence[IncrementalRequest]) -> None:
        """Take in a micro-batch; row ``i`` of ``out`` belongs to ``requests[i]``. All of it or, raising, nothing."""

    @abstractmethod
    def advance(self, budget: StepBudget) -> list[Progress]:
        """Generate until the budget is spent or nothing is pending; what changed, and what ended.

        A failure is told as a :class:`Progress` of each request that it cost; nothing is raised for it.
        """

    @abstractmethod
    def has_pending(self) -> bool:
        """Whether any request is unfinished."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Forget a request and release its memory; an unknown id is none of the strategy's business."""

    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode a micro-batch to its end (outside an engine: tests, scripts)."""
        requests = [IncrementalRequest(f"row-{index}", each) for index, each in enumerate(options)]
        ended: dict[str, Hypotheses] = {}
        try:
            for request in requests:
                if not self.reserve(request):
                    raise MemoryError(f"the decoder's memory does not hold {len(requests)} requests at once")
            self.begin_offline(out, requests)
            while self.has_pending():
                for progress in self.advance(StepBudget(_STEPS)):
                    if progress.error is not None:
                        raise progress.error
                    if progress.finished and progress.hypotheses is not None:
                        ended[progress.request_id] = progress.hypotheses
        finally:
            for request in requests:
                self.cancel(request.request_id)
        return [ended[request.request_id] for request in requests]
