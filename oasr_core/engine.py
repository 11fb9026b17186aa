"""ASREngine: the public facade, the lock and the step loop."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Sequence
from numbers import Real
from types import TracebackType
from typing import Any, cast

import numpy as np
from torch import Tensor

from oasr_core import gc_freeze
from oasr_core.audio import StreamResampler, load_audio
from oasr_core.config import EngineConfig
from oasr_core.construction import build_parts
from oasr_core.errors import (
    AudioTooLongError,
    RequestRefusedError,
    StreamClosedError,
    TranscriptionError,
    UnknownRequestError,
)
from oasr_core.executors.admission import AdmissionThread
from oasr_core.executors.failures import failed
from oasr_core.frontend.input import Waveform
from oasr_core.hooks import Observers
from oasr_core.locks import FairLock
from oasr_core.long_requests import LongRequests
from oasr_core.longform.plan import LongFormPlan
from oasr_core.model_runner import Tap
from oasr_core.request import DecodingOptions, Request, RequestOutput
from oasr_core.step_loop import StepLoop

#: How long a call that waits for another thread's admission sleeps at most, in seconds.
_POLL_SECONDS = 0.05

Audio = Waveform | str | os.PathLike[str]


class ASREngine:
    """Audio in, transcripts out.

    Thread-safe: every public call holds one re-entrant lock, :meth:`step` for the whole step. An output goes to exactly
    one consumer: the ``transcribe`` call that owns the request, else whoever calls :meth:`step` or :meth:`run`.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the checkpoint and build every part; raises ``OasrError`` for whatever cannot be served."""
        self._lock = FairLock()
        self._changed = self._lock.condition()
        self._parts = build_parts(config)
        self.config = self._parts.config
        self.load_report = self._parts.load_report
        self.observers = Observers()
        self._inputs = self._parts.inputs
        long = LongRequests(self._parts.stamp, partial_interval=self.config.partial_decode_interval)
        self._loop = StepLoop(self._parts, self.observers, long)
        self._serving = True
        self._admission = AdmissionThread(self._prepare) if self.config.overlap_admit else None
        if self.config.gc_freeze:
            gc_freeze.acquire()
        self._let_go = weakref.finalize(self, _let_go, self._admission, self.config.gc_freeze)
        self.observers.notify("oasr_engine_started", engine=self)

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def sample_rate(self) -> int:
        """Hz of the waveforms that the model takes."""
        return self._inputs.frontend.sample_rate

    @property
    def can_stream(self) -> bool:
        """Whether streaming requests are served."""
        return self._parts.streaming is not None

    @property
    def can_offline(self) -> bool:
        """Whether offline requests are served."""
        return self._parts.offline is not None or self._parts.incremental is not None

    @property
    def frame_seconds(self) -> float:
        """Seconds per encoder frame."""
        return self._parts.frame_seconds

    @property
    def stride_samples(self) -> int:
        """Samples that a stream advances per step."""
        return self._parts.stride_samples()

    @property
    def num_running(self) -> int:
        """Streams that hold a place, and requests whose tokens are being generated."""
        with self._lock:
            return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission or for a batch."""
        with self._lock:
            return self._loop.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any output uncollected."""
        with self._lock:
            return self._loop.has_work

    @property
    def tap(self) -> Tap | None:
        """A debugging aid: sees ``(request id, first frame, log-probs)`` after every forward."""
        return self._parts.runner.tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self._parts.runner.tap = tap

    def describe(self) -> dict[str, Any]:
        """What this engine is made of, in plain types."""
        return self._parts.describe()

    # -- admission ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        audio: Audio | None = None,
        streaming: bool | None = None,
        sample_rate: int | None = None,
        priority: int = 0,
        decoding: DecodingOptions | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue whole audio (a waveform in [-1, 1], or a path, decoded at the edge) and return the request's id.

        ``streaming=None`` streams where the engine can. A ``sample_rate`` other than the model's is resampled (extra
        ``audio``). Lower ``priority`` is served first. ``streaming=True`` without ``audio`` opens an empty stream.
        """
        if audio is None:
            if streaming is False:
                raise RequestRefusedError("an offline request needs audio; add_streaming_request() opens a stream")
            return self.add_streaming_request(sample_rate, priority, decoding, request_id)
        with self._lock:
            request = self._new_request(self._mode(streaming), priority, decoding, request_id)
        return self._submit(request, audio, sample_rate, owned=False)

    def add_streaming_request(
        self,
        sample_rate: int | None = None,
        priority: int = 0,
        decoding: DecodingOptions | None = None,
        request_id: str | None = None,
    ) -> str:
        """Open a stream that :meth:`feed_chunk` fills; pieces of another ``sample_rate`` are resampled with
        carried state.
        """
        with self._lock:
            request = self._new_request(self._mode(True), priority, decoding, request_id)
            if sample_rate is not None and sample_rate != self.sample_rate:
                request.resampler = StreamResampler(sample_rate, self.sample_rate)
            self._admit(request)
            return request.request_id

    def feed_chunk(self, request_id: str, chunk: Waveform | None, is_last: bool = False) -> None:
        """Append a piece of any size (``None``: nothing) to a stream; ``is_last`` ends it.

        Raises ``UnknownRequestError`` for an id that is not there, ``StreamClosedError`` after the last piece (both are
        ``KeyError``), ``InvalidAudioError`` for a piece that is refused; the stream itself goes on.
        """
        with self._lock:
            request = self._find(request_id)
            if not request.streaming:
                raise RequestRefusedError(f"request {request_id!r} is offline; its audio is complete")
            if request.audio_final:
                raise StreamClosedError(f"stream {request_id!r} has had its last piece; open a new stream")
            samples = self._inputs.prepare_waveform([] if chunk is None else chunk)
            if request.resampler is not None:
                samples = self._inputs.prepare_waveform(request.resampler.push(samples.numpy(), last=is_last))
            if len(samples):
                request.audio_chunks.append(samples)
                request.num_samples += len(samples)
                request.num_frames = self._inputs.num_frames(request.num_samples)
            request.audio_final = is_last
            self._changed.notify_all()

    def abort_request(self, request_id: str) -> None:
        """End a request now; its one terminal output says ``abort``. Raises ``UnknownRequestError`` for an
        unknown id.
        """
        with self._lock:
            self._loop.abort(self._find(request_id))
            self._changed.notify_all()

    # -- the step loop ----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One tick: admit, one offline batch, one step of every stream. Returns partials and finals nobody else
        owns.
        """
        with self._lock:
            self._tick()
            outputs = list(self._loop.ready)
            self._loop.ready.clear()
            return outputs

    def run(self) -> list[RequestOutput]:
        """Step until nothing is left or nothing can go on without new audio; returns the terminal outputs."""
        finals: list[RequestOutput] = []
        while True:
            with self._lock:
                outputs = self.step()
                finals += [output for output in outputs if output.finished]
                if not outputs and not self._loop.progressed and not self._wait():
                    return finals

    def _tick(self) -> None:
        try:
            self._loop.tick()
        finally:
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Where time alone helps (admissions being prepared, requests held back), let some pass; else say so."""
        hold = self._parts.scheduler.hold_seconds()
        if self._loop.preparing:
            hold = _POLL_SECONDS if hold is None else min(hold, _POLL_SECONDS)
        if hold is None:
            return False
        self._changed.wait(hold)
        return True

    # -- convenience --------------------------------------------------------------------------------------------------

    def transcribe_outputs(
        self,
        audio: Audio | Sequence[Audio],
        streaming: bool | None = None,
        sample_rate: int | None = None,
        decoding: DecodingOptions | None = None,
    ) -> list[RequestOutput]:
        """Transcribe one or several recordings; one output each, in input order, those that fail inside included.

        Audio or options that are refused raise, as in :meth:`add_request`; nothing is transcribed then.
        """
        items, _ = _recordings(audio)
        ids: list[str] = []
        try:
            for item in items:
                with self._lock:
                    request = self._new_request(self._mode(streaming), 0, decoding, None)
                ids.append(request.request_id)
                self._submit(request, item, sample_rate, owned=True)
            owned = self._loop.owned
            while True:
                with self._lock:
                    if all(owned[request_id] is not None for request_id in ids):
                        return [output for request_id in ids if (output := owned[request_id]) is not None]
                    self._tick()
                    if not self._loop.progressed and not self._wait():
                        self._changed.wait(_POLL_SECONDS)  # other requests hold every place
        finally:
            with self._lock:
                for request_id in ids:
                    request_left = self._loop.lookup(request_id)
                    if request_left is not None:
                        self._loop.abort(request_left)
                    self._loop.owned.pop(request_id, None)

    def transcribe(
        self, audio: Audio | Sequence[Audio], streaming: bool | None = None, sample_rate: int | None = None
    ) -> str | list[str]:
        """Texts of one recording (a string) or several (a list).

        Raises ``TranscriptionError`` where one did not come to its end (failed, aborted, or cut at a limit): a text
        alone could not say so. :meth:`transcribe_outputs` returns what there is.
        """
        outputs = self.transcribe_outputs(audio, streaming, sample_rate)
        for place, output in enumerate(outputs):
            if output.finish_reason == "error":
                raise TranscriptionError(f"recording {place}: {output.error_stage}: {output.error}")
            if output.finish_reason != "stop":
                raise TranscriptionError(
                    f"recording {place} ended early (finish_reason {output.finish_reason!r}) with the text "
                    f"{output.text!r}; transcribe_outputs() returns such outputs."
                )
        texts = [output.text for output in outputs]
        return texts if _recordings(audio)[1] else texts[0]

    def transcribe_offline(self, audio: Audio | Sequence[Audio], sample_rate: int | None = None) -> str | list[str]:
        """:meth:`transcribe` through the offline path."""
        return self.transcribe(audio, False, sample_rate)

    def new_audio_buffer(self, samples: int) -> Tensor:
        """A float32 buffer for ``samples`` samples; page-locked where the device is CUDA and the caps allow it."""
        return self._parts.audio_buffers.allocate(samples)

    def close(self) -> None:
        """Stop serving: unfinished requests are aborted. Idempotent."""
        with self._lock:
            if not self._serving:
                return
            self._serving = False
            self.observers.notify("oasr_engine_stopping", engine=self)
            for request in self._loop.unfinished():
                self._loop.abort(request)
            self._let_go()
            self._changed.notify_all()

    def __enter__(self) -> ASREngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _samples(self, audio: Audio, sample_rate: int | None) -> Tensor:
        if isinstance(audio, (str, os.PathLike)):
            if sample_rate is not None:
                raise RequestRefusedError("sample_rate is read from the file; leave it unset for a path")
            audio = load_audio(audio, sample_rate=self.sample_rate).samples
        return self._inputs.prepare_waveform(audio, sample_rate)

    def _mode(self, streaming: bool | None) -> bool:
        """The pool of a request, or a refusal that names the reason."""
        if streaming is None:
            streaming = self.can_stream
        if streaming and not self.can_stream:
            raise RequestRefusedError(f"streaming requests are not served: {self._parts.no_streaming}")
        if not streaming and not self.can_offline:
            raise RequestRefusedError(f"offline requests are not served: {self._parts.no_offline}")
        return streaming

    def _new_request(
        self, streaming: bool, priority: int, decoding: DecodingOptions | None, request_id: str | None
    ) -> Request:
        if not self._serving:
            raise RequestRefusedError("the engine has been closed")
        if decoding is None:
            decoding = DecodingOptions()
        elif not isinstance(decoding, DecodingOptions):
            raise RequestRefusedError(f"decoding={decoding!r} is no DecodingOptions; write DecodingOptions(name=value)")
        self._parts.validate(decoding, "streaming" if streaming else "offline")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestRefusedError(f"priority={priority!r} is not an integer; lower numbers are served first")
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str):
            raise RequestRefusedError(f"request_id={request_id!r} is not a string")
        self._refuse_used(request_id)
        return Request(request_id, streaming, decoding, priority)

    def _refuse_used(self, request_id: str) -> None:
        if self._loop.lookup(request_id) is not None:
            raise RequestRefusedError(f"request id {request_id!r} is in use")

    def _submit(self, request: Request, audio: Audio, sample_rate: int | None, *, owned: bool) -> str:
        """Prepare whole audio without the lock (here, or on the admission thread) and queue the request."""
        if self._admission is not None and not request.streaming:
            with self._lock:
                self._refuse_used(request.request_id)
                self._loop.preparing[request.request_id] = request
                if owned:
                    self._loop.owned[request.request_id] = None
            self._admission.submit((request, _own_memory(audio), sample_rate))
            return request.request_id
        samples = self._samples(audio, sample_rate)
        plan = self._attach(request, samples)
        with self._lock:
            if not self._serving:
                raise RequestRefusedError("the engine has been closed")
            self._refuse_used(request.request_id)
            if owned:
                self._loop.owned[request.request_id] = None
            self._admit(request, plan)
        return request.request_id

    def _attach(self, request: Request, samples: Tensor) -> LongFormPlan | None:
        """Stamp whole audio on a request, unless it is more than can be taken; a long one is planned."""
        self._parts.stamp(request, samples)
        if self._parts.is_long(request):
            return self._parts.plan_long(samples, request.decoding)
        if not request.streaming:
            self._refuse_too_long(request)
        return None

    def _prepare(self, item: tuple[Request, Audio, int | None]) -> None:
        """On the admission thread: look at the audio without the lock; queue the request unless it was withdrawn."""
        request, audio, sample_rate = item
        error: Exception | None = None
        plan: LongFormPlan | None = None
        try:
            plan = self._attach(request, self._samples(audio, sample_rate))
        except Exception as caught:
            error = caught
        with self._lock:
            if self._loop.preparing.get(request.request_id) is request:
                if error is not None:
                    self._loop.deliver(failed([request], "offline_prep", error))
                else:
                    del self._loop.preparing[request.request_id]
                    self._admit(request, plan)
            self._changed.notify_all()

    def _admit(self, request: Request, plan: LongFormPlan | None = None) -> None:
        self._loop.admit(request, plan)
        self._changed.notify_all()

    def _refuse_too_long(self, request: Request) -> None:
        seconds = request.num_samples / self.sample_rate
        window = self._inputs.frontend.window_seconds
        if window is not None and seconds > window:
            raise AudioTooLongError(
                f"{seconds:.2f} s of audio, the model's window is {window:.2f} s; set long_form=True "
                "(--long-form auto), or cut it."
            )
        limit = self._parts.runner.encoder.max_positions
        frames = self._parts.runner.encoder.output_frames(request.num_frames)
        if limit is not None and frames > limit:
            raise AudioTooLongError(
                f"{seconds:.1f} s of audio give {frames} encoder frames, the model has positions for {limit} "
                f"({limit * self.frame_seconds:.0f} s); set long_form=True (--long-form auto), or cut it."
            )

    def _find(self, request_id: str) -> Request:
        request = self._loop.lookup(request_id)
        if request is None:
            if self._loop.has_ended(request_id):
                raise StreamClosedError(f"request {request_id!r} has finished")
            unfinished = self.num_running + self.num_waiting
            raise UnknownRequestError(f"no request {request_id!r}; {unfinished} others are waiting or running")
        return request


def _recordings(audio: Audio | Sequence[Audio]) -> tuple[list[Audio], bool]:
    """The recordings, and whether several were given: a list or tuple holds recordings unless it holds numbers."""
    if isinstance(audio, (list, tuple)) and not (audio and isinstance(audio[0], Real)):
        return list(audio), True
    return [cast("Audio", audio)], False


def _own_memory(audio: Audio) -> Audio:
    """A copy of what a caller could change while another thread still has to look at it."""
    if isinstance(audio, Tensor):
        return audio.clone()
    return audio if isinstance(audio, (str, os.PathLike)) else np.array(audio)


def _let_go(admission: AdmissionThread[Any] | None, frozen: bool) -> None:
    """Give back what outlives an engine that nobody closed."""
    if admission is not None:
        admission.close()
    if frozen:
        gc_freeze.release()
