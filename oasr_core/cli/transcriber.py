"""Files through an engine: a bounded number of requests under way, their outputs to the writer and the display."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oasr_core.cli.display import Display, say
from oasr_core.cli.formats import FileResult, ResultWriter
from oasr_core.cli.logs import TRACEBACK_HINT, debug_wanted
from oasr_core.errors import OasrError, RequestRefusedError, UnknownRequestError
from oasr_core.request import DecodingOptions, RequestOutput

if TYPE_CHECKING:
    from oasr_core.audio import Audio
    from oasr_core.engine import ASREngine


@dataclass(slots=True)
class _Job:
    """A file whose request is under way; ``audio`` is kept while pieces of it are still to be fed."""

    index: int
    file: str
    duration: float
    audio: Audio | None = None
    fed: int = 0


class Transcriber:
    """Keeps up to ``limit`` files in the engine until all are written; ``feed_samples`` 0 means offline."""

    def __init__(
        self,
        engine: ASREngine,
        files: Sequence[str],
        writer: ResultWriter,
        display: Display,
        decoding: DecodingOptions,
        *,
        limit: int,
        feed_samples: int = 0,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._display = display
        self._decoding = decoding
        self._feed_samples = feed_samples
        # Offline batches are chosen among more requests than one batch holds.
        self._limit = limit if feed_samples else limit * 4
        # A piece longer than a chunk is worked off before the next one, so that partials keep up with what was fed.
        self._steps = math.ceil(feed_samples / engine.stride_samples) if feed_samples else 1
        self._waiting = iter(enumerate(files))
        self._jobs: dict[str, _Job] = {}
        self._unencoded: set[str] = set()

    def run(self) -> None:
        """Transcribe all files; a file's own failure goes to the writer, an engine's is raised."""
        while self._admit():
            self._feed()
            for _ in range(self._steps):
                outputs = self._engine.step()
                for output in outputs:
                    self._receive(output)
            all_fed = all(job.audio is None for job in self._jobs.values())
            if self._jobs and all_fed and not outputs and not self._engine.has_work:
                raise OasrError(f"the engine has no work left, but {len(self._jobs)} files have no final output")
        with self._display.hidden():
            self._writer.close()

    def _admit(self) -> bool:
        """Fill the free places; returns whether any request is under way."""
        while len(self._jobs) < self._limit:
            index, file = next(self._waiting, (-1, ""))
            if index < 0:
                break
            try:
                audio = _load(file, self._engine.sample_rate)
                request_id = self._submit(audio)
            except RequestRefusedError:
                raise
            except OasrError as error:
                self._finish(index, FileResult(file, error=str(error)))
                continue
            self._display.opened(index, audio.duration)
            self._jobs[request_id] = _Job(index, file, audio.duration, audio if self._feed_samples else None)
        return bool(self._jobs)

    def _submit(self, audio: Audio) -> str:
        if self._feed_samples:
            return self._engine.add_streaming_request(decoding=self._decoding)
        return self._engine.add_request(audio.samples, streaming=False, decoding=self._decoding)

    def _feed(self) -> None:
        """Give every stream its next piece."""
        for request_id, job in list(self._jobs.items()):
            if job.audio is None:
                continue
            piece = job.audio.samples[job.fed : job.fed + self._feed_samples]
            job.fed += len(piece)
            last = job.fed >= len(job.audio.samples)
            try:
                self._engine.feed_chunk(request_id, piece, is_last=last)
            except OasrError as error:
                with suppress(UnknownRequestError):  # the engine may have given it up itself
                    self._engine.abort_request(request_id)
                del self._jobs[request_id]
                self._finish(job.index, FileResult(job.file, job.duration, error=str(error)))
            if last:
                job.audio = None

    def _receive(self, output: RequestOutput) -> None:
        job = self._jobs.get(output.request_id)
        if job is None:  # the terminal output of a request that was aborted above
            return
        self._warn_of_hotwords(output.unencoded_hotwords)
        if not output.finished:
            seconds = job.fed / self._engine.sample_rate if self._feed_samples else _reached(output)
            self._display.partial(job.index, job.file, output.text, seconds)
            return
        del self._jobs[output.request_id]
        if output.finish_reason in ("stop", "length"):
            self._finish(job.index, FileResult(job.file, job.duration, output))
        else:
            stage = f" (stage {output.error_stage})" if output.error_stage else ""
            error = f"{output.error or output.finish_reason}{stage}"
            hint = TRACEBACK_HINT if stage and not debug_wanted() else ""
            self._finish(job.index, FileResult(job.file, job.duration, error=error, hint=hint))

    def _warn_of_hotwords(self, unencoded: Sequence[str]) -> None:
        """Say once of each phrase that the model cannot encode it."""
        new = [phrase for phrase in unencoded if phrase not in self._unencoded]
        self._unencoded.update(new)
        if new:
            with self._display.hidden():
                for phrase in new:
                    say(f"warning: the hotword {phrase!r} has no effect: the model's tokenizer cannot encode it")

    def _finish(self, index: int, result: FileResult) -> None:
        self._display.done(index)
        self._writer.put(index, result, self._display.hidden())


def _reached(output: RequestOutput) -> float:
    """Seconds of audio up to the end of a partial transcript, as far as it says."""
    if output.consumed_seconds is not None:
        return output.consumed_seconds
    if output.segments:
        return output.segments[-1].end
    return output.timestamps[-1] if output.timestamps else 0.0


def _load(file: str, sample_rate: int) -> Audio:
    """Decode a file, or standard input for ``-``, to the model's sampling rate."""
    from oasr_core.audio import load_audio

    return load_audio(sys.stdin.buffer if file == "-" else file, sample_rate=sample_rate)
