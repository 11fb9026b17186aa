"""The measured loop of ``oasr bench``: a fixed number of requests in the engine, and the times of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oasr_core.errors import OasrError, RequestRefusedError

if TYPE_CHECKING:
    from rich.console import Console

    from oasr_core.audio import Audio
    from oasr_core.engine import ASREngine
    from oasr_core.request import RequestOutput


@dataclass(frozen=True, slots=True)
class Utterance:
    """One line of a manifest."""

    audio: Path
    text: str


class Stopwatch:
    """Seconds of :func:`time.perf_counter`, less those spent in :meth:`paused`."""

    def __init__(self) -> None:
        self._paused = 0.0

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.perf_counter() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the measurement."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begun


@dataclass(slots=True)
class Measured:
    """One utterance under way or done; ``begun`` to ``final`` are times of the stopwatch, in seconds.

    ``begun`` is its submission (a stream: its first piece), ``ended`` its submission (a stream: its last piece).
    ``shown`` holds, for each output with a stable prefix, the seconds of audio fed, the characters of the text and
    those of them that are stable.
    """

    utterance: Utterance
    duration: float = 0.0
    audio: Audio | None = None
    fed: int = 0
    begun: float = 0.0
    ended: float = 0.0
    first_text: float | None = None
    final: float | None = None
    text: str = ""
    error: str | None = None
    shown: list[tuple[float, int, int]] = field(default_factory=list)

    def stable_prefix_lags(self) -> list[float]:
        """For each character of the final text, the seconds of audio fed from its first showing to its stability."""
        shown_at: list[float] = []
        lags: list[float] = []
        for fed, length, stable in self.shown:
            shown_at += [fed] * (length - len(shown_at))
            lags += [fed - since for since in shown_at[len(lags) : stable]]
        return lags


@dataclass(frozen=True, slots=True)
class Run:
    """All utterances in the order of the manifest, and the seconds that the engine took for them."""

    measured: list[Measured]
    wall_seconds: float
    streaming: bool


class LoadGenerator:
    """Keeps ``in_flight`` requests in the engine until every utterance is done."""

    def __init__(self, engine: ASREngine, *, streaming: bool, in_flight: int, console: Console | None = None) -> None:
        """With a ``console`` that is a terminal, progress is shown on it."""
        self._engine = engine
        self._stride = engine.stride_samples if streaming else 0
        self._in_flight = in_flight
        self._console = console
        self._clock = Stopwatch()
        self._live: dict[str, Measured] = {}

    def run(self, utterances: Sequence[Utterance]) -> Run:
        """Transcribe and time; an utterance's own failure is kept with it, an engine's is raised."""
        measured = [Measured(utterance) for utterance in utterances]
        waiting = iter(measured)
        started = self._clock()
        with self._progress(len(measured)) as advance:
            while self._admit(waiting):
                self._feed()
                outputs = self._engine.step()
                now = self._clock()
                for output in outputs:
                    self._receive(output, now)
                fed = all(job.audio is None for job in self._live.values())
                if self._live and fed and not outputs and not self._engine.has_work:
                    raise OasrError(
                        f"the engine has no work left, but {len(self._live)} utterances have no final output"
                    )
                with self._clock.paused():
                    advance(sum(output.finished for output in outputs))
        return Run(measured, self._clock() - started, bool(self._stride))

    def _admit(self, waiting: Iterator[Measured]) -> bool:
        """Fill the free places; returns whether any request is under way."""
        while len(self._live) < self._in_flight:
            job = next(waiting, None)
            if job is None:
                break
            try:
                with self._clock.paused():
                    audio = load(job.utterance.audio, self._engine.sample_rate)
                job.duration = audio.duration
                job.begun = job.ended = self._clock()
                if self._stride:
                    job.audio = audio
                    request_id = self._engine.add_streaming_request()
                else:
                    request_id = self._engine.add_request(audio.samples, streaming=False)
            except RequestRefusedError:
                raise
            except OasrError as error:
                job.error = str(error)
            else:
                self._live[request_id] = job
        return bool(self._live)

    def _feed(self) -> None:
        """Give every stream its next stride."""
        for request_id, job in list(self._live.items()):
            if job.audio is None:
                continue
            piece = job.audio.samples[job.fed : job.fed + self._stride]
            job.ended = self._clock()
            if job.fed == 0:
                job.begun = job.ended
            job.fed += len(piece)
            last = job.fed >= len(job.audio.samples)
            if last:
                job.audio = None
            try:
                self._engine.feed_chunk(request_id, piece, is_last=last)
            except OasrError as error:
                job.error = str(error)
                del self._live[request_id]
                self._engine.abort_request(request_id)

    def _receive(self, output: RequestOutput, now: float) -> None:
        job = self._live.get(output.request_id)
        if job is None:  # the terminal output of a stream that was aborted above
            return
        if job.first_text is None and output.text:
            job.first_text = now
        stable = getattr(output, "stable_prefix_chars", None)
        if stable is not None:
            length = len(output.text)
            job.shown.append((job.fed / self._engine.sample_rate, length, length if output.finished else stable))
        if not output.finished:
            return
        del self._live[output.request_id]
        if output.finish_reason in ("stop", "length"):
            job.final, job.text = now, output.text
        else:
            stage = f" (stage {output.error_stage})" if output.error_stage else ""
            job.error = f"{output.error or output.finish_reason}{stage}"

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[int], None]]:
        """A function that advances the progress bar; the bar is drawn off the clock and by no thread of its own."""
        from rich.progress import Progress

        if self._console is None or not self._console.is_terminal:
            yield lambda done: None
            return
        with Progress(console=self._console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task("measuring", total=total)
            yield lambda done: progress.update(task, advance=done, refresh=True) if done else None


def load(path: Path, sample_rate: int) -> Audio:
    """Decode a file to the model's sampling rate."""
    from oasr_core.audio import load_audio

    return load_audio(path, sample_rate=sample_rate)
