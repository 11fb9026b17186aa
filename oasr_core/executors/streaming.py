"""The streaming executor: one step of every stream that has work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from oasr_core.decoding.base import DecodeStrategy, Hypotheses, Session
from oasr_core.executors.failures import failed
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.streaming import FeatureStream
from oasr_core.model_runner import ModelRunner
from oasr_core.outputs import OutputProcessor, TextState
from oasr_core.request import FinishReason, Request, RequestOutput, RequestState
from oasr_core.streaming.base import StreamChunk, StreamingEncoderBackend


@dataclass
class StreamingStep:
    """What a step did; ``progressed`` tells a waiting stream from a working one."""

    outputs: list[RequestOutput] = field(default_factory=list)
    progressed: bool = False


@dataclass(slots=True)
class _Live:
    """A running stream with the parts that admission gave it."""

    request: Request
    features: FeatureStream
    session: Session
    text: TextState


class StreamingExecutor:
    """Features, forward, decode and text of all running streams, batched at every stage."""

    def __init__(
        self,
        inputs: InputProcessor,
        runner: ModelRunner,
        backend: StreamingEncoderBackend,
        strategy: DecodeStrategy,
        outputs: OutputProcessor,
        *,
        partial_interval: int = 1,
    ) -> None:
        self._inputs = inputs
        self._runner = runner
        self._backend = backend
        self._geometry = backend.geometry
        self._strategy = strategy
        self._outputs = outputs
        self._partial_interval = partial_interval
        self._live: dict[str, _Live] = {}

    def open(self, request: Request) -> None:
        """Give an admitted stream its state, its features, its session and its text."""
        session = self._strategy.open(request.decoding)
        try:
            self._backend.open(request.request_id)
        except BaseException:
            self._strategy.close(session)
            raise
        request.features = self._inputs.open_stream()
        request.state = RequestState.RUNNING
        self._live[request.request_id] = _Live(request, request.features, session, self._outputs.open())

    def close(self, request: Request) -> None:
        """Take it all back; a request that was never admitted has nothing to give."""
        live = self._live.pop(request.request_id, None)
        if live is not None:
            self._strategy.close(live.session)
            self._backend.close(request.request_id)
        request.audio_chunks.clear()
        request.state = RequestState.FINISHED

    def step(self, running: Iterable[Request]) -> StreamingStep:
        """Advance every running stream by at most one encoder stride."""
        live = [self._live[request.request_id] for request in running]
        step = StreamingStep()
        live = self._extract(live, step)
        ready: list[_Live] = []
        for stream in live:
            if self._is_ready(stream):
                ready.append(stream)
            elif stream.features.finished:
                self._finish(stream, None, "stop", step)
        ready = self._within_capacity(ready, step)
        if ready:
            step.progressed = True
            self._advance(ready, step)
        return step

    def _extract(self, live: list[_Live], step: StreamingStep) -> list[_Live]:
        """Move audio to the features: what the next window lacks, of all streams in one computation."""
        fresh = [stream for stream in live if stream.request.has_pending_audio and self._take_audio(stream)]
        if not fresh:
            return live
        step.progressed = True
        try:
            self._inputs.extract_streaming_batch([stream.features for stream in fresh])
            for stream in fresh:
                if stream.features.finished and self._geometry.flush_frames:
                    width = self._inputs.frontend.feature_dim
                    stream.features.append_frames(
                        torch.full((self._geometry.flush_frames, width), self._geometry.flush_value)
                    )
        except Exception as error:
            step.outputs += failed([stream.request for stream in fresh], "streaming_features", error)
            return [stream for stream in live if stream not in fresh]
        return live

    def _take_audio(self, stream: _Live) -> bool:
        """Append queued samples until the next window is covered or the queue is empty; finish behind the last
        sample.
        """
        request, features = stream.request, stream.features
        framing = self._inputs.frontend.framing
        if framing is None:
            raise RuntimeError("a frontend without framing cannot stream")
        last = features.cursor + self._window(request) - 1
        wanted = framing.start(last) + framing.span - features.samples_received
        took = False
        while request.audio_chunks and wanted > 0:
            chunk = request.audio_chunks[0]
            if len(chunk) > wanted:
                request.audio_chunks[0] = chunk[wanted:]
                chunk = chunk[:wanted]
            else:
                request.audio_chunks.popleft()
            features.append(chunk)
            wanted -= len(chunk)
            took = True
        if request.audio_final and not request.audio_chunks:
            features.finish()
            took = True
        return took

    def _window(self, request: Request) -> int:
        geometry = self._geometry
        return geometry.first_window if request.offset == 0 and geometry.first_window else geometry.window

    def _is_ready(self, stream: _Live) -> bool:
        frames = stream.features.frames_ready
        return frames >= self._window(stream.request) or (
            stream.features.finished and frames >= self._geometry.min_final
        )

    def _within_capacity(self, ready: list[_Live], step: StreamingStep) -> list[_Live]:
        """Asked before dispatch, so that no allocator can fail inside a forward: who is full ends with ``length``."""
        fitting: list[_Live] = []
        for stream in ready:
            frames = min(stream.features.frames_ready, self._window(stream.request))
            if self._backend.at_capacity(stream.request.offset, frames):
                self._finish(stream, None, "length", step)
            else:
                fitting.append(stream)
        return fitting

    def _advance(self, ready: Sequence[_Live], step: StreamingStep) -> None:
        """One forward and one decode for the cohort; it fails whole, as a retry would commit a chunk twice."""
        try:
            chunks = [
                StreamChunk(s.request.request_id, s.features.window(self._window(s.request)), s.request.offset)
                for s in ready
            ]
            out = self._runner.forward_streaming(chunks)
            self._runner.observe([chunk.stream_id for chunk in chunks], [chunk.offset for chunk in chunks], out)
            last = [self._commit(stream, chunk) for stream, chunk in zip(ready, chunks, strict=True)]
            hypotheses = self._strategy.decode_chunk([stream.session for stream in ready], out, last)
        except Exception as error:
            step.outputs += failed([stream.request for stream in ready], "streaming_forward", error)
            return
        for stream, hyps, ended in zip(ready, hypotheses, last, strict=True):
            if ended:
                self._finish(stream, hyps, "stop", step)
            else:
                self._partial(stream, hyps, step)

    def _commit(self, stream: _Live, chunk: StreamChunk) -> bool:
        """Move the cursor behind the consumed window; whether nothing can follow."""
        stream.request.offset += self._runner.encoder.output_frames(chunk.features.shape[0])
        stream.features.advance(self._geometry.stride)
        return stream.features.finished and stream.features.frames_ready < self._geometry.min_final

    def _partial(self, stream: _Live, hyps: Hypotheses, step: StreamingStep) -> None:
        request = stream.request
        request.chunks_decoded += 1
        if self._partial_interval <= 0 or request.chunks_decoded % self._partial_interval:
            return
        try:
            output = self._outputs.partial(stream.text, request.request_id, hyps, request.decoding)
        except Exception as error:
            step.outputs += failed([request], "streaming_forward", error)
        else:
            step.outputs.append(output)

    def _finish(self, stream: _Live, hyps: Hypotheses | None, reason: FinishReason, step: StreamingStep) -> None:
        """The terminal output; without ``hyps`` what the session holds."""
        request = stream.request
        step.progressed = True
        duration = request.num_samples / self._inputs.frontend.sample_rate
        try:
            hyps = self._strategy.current(stream.session) if hyps is None else hyps
            output = self._outputs.final(
                request.request_id, hyps, request.decoding, finish_reason=reason, duration=duration
            )
        except Exception as error:
            step.outputs += failed([request], "streaming_forward", error)
        else:
            step.outputs.append(output)
