"""What the executors of whole utterances ask of a request's waveform."""

from __future__ import annotations

from torch import Tensor

from oasr_core.request import Request
from oasr_core.segmenters.gate import SilenceGate


def waveform(request: Request) -> Tensor:
    """The audio that admission has put on an offline request."""
    if request.audio is None:
        raise RuntimeError(f"offline request {request.request_id!r} was admitted without audio")
    return request.audio


def is_silent(request: Request, gate: SilenceGate | None, sample_rate: int) -> bool:
    """Whether the gate, where there is one, keeps a request away from the decoder."""
    return gate is not None and gate.is_silent(waveform(request), sample_rate)
