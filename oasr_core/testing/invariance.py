"""The invariance checker: batch, order, padding, chunking and neighbours must not change what a request gets.

The reference is the request alone, whole audio at once, on the same engine settings. Compared are texts, tokens and,
through the engine's tap, per-frame log-probs: tokens alone do not catch a wrong position or a wrong convolution pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from oasr_core.engine import ASREngine
from oasr_core.request import DecodingOptions, RequestOutput

#: Largest difference of log-probs in fp32, times the largest magnitude of the reference.
FP32_TOLERANCE = 5e-5


@dataclass
class Observation:
    """What one request got: its terminal output and the log-probs of all its frames."""

    output: RequestOutput
    log_probs: Tensor


@dataclass
class Recorder:
    """Collects tapped frames by request; a gap or an overlap of frames is an error."""

    frames: dict[str, list[Tensor]] = field(default_factory=dict)

    def __call__(self, request_id: str, first: int, values: Tensor) -> None:
        """The engine's tap."""
        have = sum(part.shape[0] for part in self.frames.get(request_id, []))
        if have != first:
            raise AssertionError(f"{request_id}: frames from {first} on follow {have} frames")
        self.frames.setdefault(request_id, []).append(values)

    def take(self, request_id: str) -> Tensor:
        """All frames of a request."""
        parts = self.frames.pop(request_id, [])
        return torch.cat(parts) if parts else torch.empty(0, 0)


@contextmanager
def recording(engine: ASREngine) -> Iterator[Recorder]:
    """Tap an engine."""
    recorder = Recorder()
    engine.tap = recorder
    try:
        yield recorder
    finally:
        engine.tap = None


_ids = count()


def run_offline(
    engine: ASREngine, waveforms: Sequence[Tensor], *, order: Sequence[int] | None = None
) -> list[Observation]:
    """All requests at once, submitted in ``order``; results in the order of ``waveforms``."""
    order = range(len(waveforms)) if order is None else order
    with recording(engine) as recorder:
        ids: dict[int, str] = {}
        for place in order:
            ids[place] = engine.add_request(waveforms[place], streaming=False, request_id=f"inv-{next(_ids)}")
        outputs = {output.request_id: output for output in engine.run()}
        return [Observation(outputs[ids[i]], recorder.take(ids[i])) for i in range(len(waveforms))]


def run_streaming(
    engine: ASREngine,
    waveforms: Sequence[Tensor],
    pieces: Callable[[int, int], int],
    *,
    stagger: int = 0,
    decoding: DecodingOptions | None = None,
) -> list[Observation]:
    """Feed all streams side by side, ``pieces(stream, piece)`` samples at a time, stream ``i`` starting ``i *
    stagger`` rounds late.

    One engine step follows each round, so streams of different age share cohorts.
    """
    with recording(engine) as recorder:
        ids: list[str | None] = [None] * len(waveforms)
        fed = [0] * len(waveforms)
        piece = [0] * len(waveforms)
        open_streams = set(range(len(waveforms)))
        finals: dict[str, RequestOutput] = {}
        turn = 0
        while open_streams:
            for i in sorted(open_streams):
                if turn < i * stagger:
                    continue
                stream_id = ids[i]
                if stream_id is None:
                    ids[i] = stream_id = engine.add_streaming_request(request_id=f"inv-{next(_ids)}", decoding=decoding)
                size = pieces(i, piece[i])
                chunk = waveforms[i][fed[i] : fed[i] + size]
                fed[i] += len(chunk)
                piece[i] += 1
                last = fed[i] >= len(waveforms[i])
                engine.feed_chunk(stream_id, chunk, is_last=last)
                if last:
                    open_streams.discard(i)
            turn += 1
            finals.update({output.request_id: output for output in engine.step() if output.finished})
        finals.update({output.request_id: output for output in engine.run()})
        return [Observation(finals[i], recorder.take(i)) for i in ids if i is not None]


def assert_equal(
    got: Sequence[Observation], want: Sequence[Observation], *, tolerance: float | None = FP32_TOLERANCE, what: str = ""
) -> None:
    """Texts, tokens and timestamps exact; log-probs within ``tolerance`` times the largest magnitude (``None``:
    not compared).
    """
    for place, (mine, reference) in enumerate(zip(got, want, strict=True)):
        where = f"{what} request {place}"
        if mine.output.finish_reason != reference.output.finish_reason:
            raise AssertionError(f"{where}: {mine.output.finish_reason} ({mine.output.error}) instead of stop")
        if mine.log_probs.shape != reference.log_probs.shape:
            raise AssertionError(f"{where}: frames {mine.log_probs.shape} instead of {reference.log_probs.shape}")
        if tolerance is not None and mine.log_probs.numel():
            worst = (mine.log_probs - reference.log_probs).abs().max().item()
            bound = tolerance * max(reference.log_probs.abs().max().item(), 1.0)
            if not worst <= bound:
                raise AssertionError(f"{where}: log-probs differ by {worst:.3g}, allowed {bound:.3g}")
        for name in ("text", "tokens", "timestamps"):
            if getattr(mine.output, name) != getattr(reference.output, name):
                raise AssertionError(
                    f"{where}: {name} {getattr(mine.output, name)!r} instead of {getattr(reference.output, name)!r}"
                )
