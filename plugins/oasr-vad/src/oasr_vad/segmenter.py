"""The segmenter ``vad``: speech as silero-vad hears it, of whole waveforms and of streams."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import BaseModel
from torch import Tensor

from oasr_core.segmenters.base import Segmenter, SpeechSpan, SpeechStream
from oasr_vad.model import Floats, SpeechModel
from oasr_vad.options import VadOptions
from oasr_vad.spans import speech_spans


class VadSegmenter(Segmenter):
    """Spans of speech; long audio is cut in the silence between them, and long silence is left out."""

    oasr_api = "1.0"
    options_cls: ClassVar[type[BaseModel]] = VadOptions
    offers_streams = True
    options: VadOptions

    def __init__(self, options: VadOptions, sample_rate: int) -> None:
        """Loads the network; ``ConfigError`` for a rate other than 8000 and 16000 Hz."""
        super().__init__(options, sample_rate)
        self.model = SpeechModel(sample_rate)

    def speech(self, waveform: Tensor) -> list[SpeechSpan]:
        """Spans of speech, in order; their edges lie on a grid of 32 ms, but for the padding."""
        samples = _samples(waveform)
        padded = np.pad(samples, (0, -len(samples) % self.model.window))
        probabilities = self.model.probabilities(padded.reshape(-1, self.model.window), self.model.start())
        return speech_spans(
            probabilities.tolist(),
            self.options,
            window=self.model.window,
            sample_rate=self.sample_rate,
            samples=len(samples),
        )

    def open_stream(self) -> SpeechStream:
        """Follow one stream."""
        return VadStream(self.model, self.options)


class VadStream(SpeechStream):
    """Judges a stream in windows of 32 ms; samples that do not fill one wait for the next."""

    def __init__(self, model: SpeechModel, options: VadOptions) -> None:
        self.model = model
        self.options = options
        self.speaking = False
        self._state = model.start()
        self._waiting: Floats = np.zeros(0, np.float32)
        self._judged = 0
        self._speech_end = 0

    def push(self, samples: Tensor) -> None:
        """Take the next samples, ``(n,)`` float32."""
        window = self.model.window
        audio = np.concatenate([self._waiting, _samples(samples)])
        whole = len(audio) // window * window
        self._waiting = audio[whole:].copy()
        for probability in self.model.probabilities(audio[:whole].reshape(-1, window), self._state).tolist():
            self._judged += window
            if probability >= self.options.threshold:
                self.speaking = True
            elif probability < self.options.end_threshold:
                self.speaking = False
            if self.speaking:
                self._speech_end = self._judged

    @property
    def trailing_silence_seconds(self) -> float:
        """Seconds of the judged audio behind the last speech."""
        return (self._judged - self._speech_end) / self.model.sample_rate


def _samples(waveform: Tensor) -> Floats:
    found: Floats = waveform.detach().cpu().float().contiguous().numpy()
    return found
