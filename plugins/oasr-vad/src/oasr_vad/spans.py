"""Probabilities of speech become spans of speech."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.segmenters.base import SpeechSpan
from oasr_vad.options import VadOptions


def speech_spans(
    probabilities: Sequence[float], options: VadOptions, *, window: int, sample_rate: int, samples: int
) -> list[SpeechSpan]:
    """Spans in samples, of probabilities of consecutive windows of ``window`` samples; the audio has ``samples``.

    Speech begins with the first window that reaches ``threshold`` and ends with the first below ``neg_threshold`` that
    is followed by ``min_silence_seconds`` without one that reaches ``threshold``. The rules are silero-vad's
    (``get_speech_timestamps``, without a limit of duration).
    """
    shortest = options.min_speech_seconds * sample_rate
    spans = [
        span
        for span in _raw_spans(probabilities, options, window, sample_rate, samples)
        if span.end - span.start > shortest
    ]
    return _padded(spans, options.speech_pad_seconds * sample_rate, samples)


def _raw_spans(
    probabilities: Sequence[float], options: VadOptions, window: int, sample_rate: int, samples: int
) -> list[SpeechSpan]:
    pause = options.min_silence_seconds * sample_rate
    spans = []
    begin: int | None = None
    quiet_from: int | None = None
    for index, probability in enumerate(probabilities):
        position = index * window
        if probability >= options.threshold:
            begin = position if begin is None else begin
            quiet_from = None
        elif begin is not None and probability < options.end_threshold:
            quiet_from = position if quiet_from is None else quiet_from
            if position - quiet_from >= pause:
                spans.append(SpeechSpan(begin, quiet_from))
                begin = quiet_from = None
    if begin is not None:
        spans.append(SpeechSpan(begin, samples))
    return spans


def _padded(spans: Sequence[SpeechSpan], pad: float, samples: int) -> list[SpeechSpan]:
    """Spans with ``pad`` more on both sides; neighbours that are nearer than twice that share what is between them."""
    padded = []
    for index, span in enumerate(spans):
        start = max(span.start - pad, 0)
        end = min(span.end + pad, samples)
        if index and span.start - spans[index - 1].end < 2 * pad:
            start = span.start - (span.start - spans[index - 1].end) // 2
        if index + 1 < len(spans) and spans[index + 1].start - span.end < 2 * pad:
            end = span.end + (spans[index + 1].start - span.end) // 2
        padded.append(SpeechSpan(int(start), int(end)))
    return padded
