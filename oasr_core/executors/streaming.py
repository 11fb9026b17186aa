"""The streaming executor: one step of every stream that has work."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from oasr_core.decoding.base import DecodeStrategy, Hypotheses, Hypothesis, Session
from oasr_core.decoding.endpoint import Endpointer, joined, part
from oasr_core.decoding.options import EndpointOptions
from oasr_core.errors import PluginContractError
from oasr_core.executors.failures import failed
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.streaming import FeatureStream
from oasr_core.model_runner import ModelRunner
from oasr_core.outputs import OutputProcessor, TextState
from oasr_core.request import FinishReason, Request, RequestOutput, RequestState
from oasr_core.segmenters.base import Segmenter, SpeechStream
from oasr_core.streaming.base import StreamChunk, StreamingEncoderBackend

logger = logging.getLogger(__name__)


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
    endpointer: Endpointer | None = None
    #: The segmenter's ear on the stream, where its silence is the one that counts.
    speech: SpeechStream | None = None
    #: What was said before the decoder was reset, and the encoder frame at which it was.
    before: Hypothesis | None = None
    reset_frame: int = 0

    def whole(self, hyps: Hypotheses) -> Hypotheses:
        """Hypotheses of the whole stream."""
        return hyps if self.before is None else joined(self.before, hyps, self.reset_frame)


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
        endpointing: EndpointOptions,
        segmenter: Segmenter | None = None,
        partial_interval: int = 1,
    ) -> None:
        """``segmenter``: counts the silence of endpoints in place of the decoder."""
        self._inputs = inputs
        self._runner = runner
        self._backend = backend
        self._geometry = backend.geometry
        self._strategy = strategy
        self._outputs = outputs
        self._partial_interval = partial_interval
        self._endpointing = endpointing
        self._segmenter = segmenter
        self._frame_seconds = inputs.frontend.frame_seconds * runner.encoder.subsampling_rate
        self._live: dict[str, _Live] = {}

    def open(self, request: Request) -> None:
        """Give an admitted stream its state, its features, its session and its text."""
        with ExitStack() as undo:
            session = self._strategy.open(request.decoding)
            undo.callback(self._strategy.close, session)
            self._backend.open(request.request_id)
            undo.callback(self._backend.close, request.request_id)
            live = _Live(request, self._inputs.open_stream(), session, self._outputs.open())
            wanted = request.decoding.endpointing
            if self._endpointing.endpointing if wanted is None else wanted:
                live.endpointer = Endpointer(self._endpointing.endpoint_rules, self._frame_seconds)
                live.speech = self._segmenter.open_stream() if self._segmenter is not None else None
            undo.pop_all()
        request.features = live.features
        request.state = RequestState.RUNNING
        self._live[request.request_id] = live

    def is_open(self, request: Request) -> bool:
        """Whether an admitted stream has been given its state."""
        return request.request_id in self._live

    def close(self, request: Request) -> None:
        """Take it all back; a request that was never admitted has nothing to give."""
        live = self._live.pop(request.request_id, None)
        request.audio_chunks.clear()
        request.state = RequestState.FINISHED
        if live is None:
            return
        try:
            self._strategy.close(live.session)
        except Exception:
            logger.exception("closing the decoding session of %s failed", request.request_id)
        finally:
            self._backend.close(request.request_id)

    def interrupted(self, request: Request, output: RequestOutput) -> RequestOutput:
        """A terminal output of a stream that did not come to its end, with what its partials have shown so far."""
        live = self._live.get(request.request_id)
        if live is not None:
            live.text.show_in(output)
        return output

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
        fresh: list[_Live] = []
        for stream in list(live):
            try:
                if stream.request.has_pending_audio and self._take_audio(stream):
                    fresh.append(stream)
            except Exception as error:  # a segmenter's
                step.outputs += self._failed([stream], "streaming_features", error)
                live = [other for other in live if other is not stream]
        if not fresh:
            return live
        step.progressed = True
        try:
            self._inputs.extract_streaming_batch([stream.features for stream in fresh])
            for stream in fresh:
                if stream.features.finished and self._geometry.flush_frames:
                    width = self._inputs.frontend.feature_dim
                    shape = (self._geometry.flush_frames, width)
                    stream.features.append_frames(
                        torch.full(shape, self._geometry.flush_value, device=self._inputs.device)
                    )
        except Exception as error:
            step.outputs += self._failed(fresh, "streaming_features", error)
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
            if stream.speech is not None:
                stream.speech.push(chunk)
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
            last = [self._is_last(stream) for stream in ready]
            hypotheses = self._strategy.decode_chunk([stream.session for stream in ready], out, last)
            if len(hypotheses) != len(ready):
                raise PluginContractError(
                    f"{type(self._strategy).__name__}.decode_chunk gave {len(hypotheses)} results for {len(ready)} "
                    "streams"
                )
        except Exception as error:
            step.outputs += self._failed(ready, "streaming_forward", error)
            return
        for stream, chunk in zip(ready, chunks, strict=True):
            self._consume(stream, chunk)
        for stream, hyps, ended in zip(ready, hypotheses, last, strict=True):
            if ended:
                self._finish(stream, hyps, "stop", step)
            else:
                self._partial(stream, stream.whole(hyps), step)

    def _is_last(self, stream: _Live) -> bool:
        """Whether nothing can follow the window that the stream is about to consume."""
        left = max(stream.features.frames_ready - self._geometry.stride, 0)
        return stream.features.finished and left < self._geometry.min_final

    def _consume(self, stream: _Live, chunk: StreamChunk) -> None:
        """Move the cursor behind the window."""
        stream.request.offset += self._backend.step_frames(chunk.features.shape[0])
        stream.features.advance(self._geometry.stride)

    def _partial(self, stream: _Live, hyps: Hypotheses, step: StreamingStep) -> None:
        """What a chunk changed: a partial where one is due, and always where a segment ends."""
        request = stream.request
        request.chunks_decoded += 1
        try:
            if stream.speech is not None:
                silence = stream.speech.trailing_silence_seconds
                hyps.trailing_silence_frames = round(silence / self._frame_seconds)
            commit = None if stream.endpointer is None else stream.endpointer.update(hyps, request.offset)
            due = self._partial_interval > 0 and request.chunks_decoded % self._partial_interval == 0
            if commit is None and not due:
                return
            output = self._outputs.partial(stream.text, request.request_id, hyps, request.decoding)
            if commit is not None:
                output.is_segment_final = True
                said = part(hyps.best, commit.first, commit.last)
                duration = request.num_samples / self._inputs.frontend.sample_rate
                output.segments = self._outputs.segments(said, request.decoding, duration)
                if self._endpointing.endpoint_reset == "decoder":
                    self._reset(stream, hyps.best)
        except Exception as error:
            step.outputs += self._failed([stream], "streaming_forward", error)
        else:
            step.outputs.append(output)

    def _reset(self, stream: _Live, best: Hypothesis) -> None:
        """Begin the search anew behind everything said so far; encoder and positions go on."""
        self._strategy.close(stream.session)
        stream.session = self._strategy.open(stream.request.decoding)
        stream.before = copy.deepcopy(best)
        stream.reset_frame = stream.request.offset

    def _finish(self, stream: _Live, hyps: Hypotheses | None, reason: FinishReason, step: StreamingStep) -> None:
        """The terminal output; without ``hyps`` what the session holds."""
        request = stream.request
        step.progressed = True
        duration = request.num_samples / self._inputs.frontend.sample_rate
        try:
            hyps = stream.whole(self._strategy.current(stream.session) if hyps is None else hyps)
            output = self._outputs.final(
                request.request_id,
                hyps,
                request.decoding,
                finish_reason=reason,
                duration=duration,
                boundaries=stream.endpointer.boundaries if stream.endpointer is not None else (),
            )
        except Exception as error:
            step.outputs += self._failed([stream], "streaming_forward", error)
        else:
            step.outputs.append(output)

    def _failed(self, streams: Sequence[_Live], stage: str, error: Exception) -> list[RequestOutput]:
        requests = [stream.request for stream in streams]
        outputs = failed(requests, stage, error)
        return [self.interrupted(request, output) for request, output in zip(requests, outputs, strict=True)]
