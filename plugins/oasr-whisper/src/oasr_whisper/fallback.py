"""Decoding again at a higher temperature: when, and which result is kept."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from oasr_whisper.options import AedOptions

Result = TypeVar("Result")


class Attempt(NamedTuple, Generic[Result]):
    """What came of one temperature: the text's compression ratio, and the average log probability of its tokens."""

    temperature: float
    avg_log_prob: float
    compression_ratio: float
    result: Result


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes the text; repetitions make it large. 0 for no text."""
    data = text.strip().encode("utf-8")
    return len(data) / len(zlib.compress(data)) if data else 0.0


def average_log_prob(total: float, tokens: int) -> float:
    """``total``, the sum of the log probabilities, over the number of tokens with the end's."""
    return total / (tokens + 1)


def is_silence(options: AedOptions, avg_log_prob: float, no_speech_prob: float | None) -> bool:
    """Whether a result is to be taken for silence."""
    if options.no_speech_threshold is None or no_speech_prob is None:
        return False
    confident = options.log_prob_threshold is not None and avg_log_prob > options.log_prob_threshold
    return no_speech_prob > options.no_speech_threshold and not confident


def is_too_repetitive(options: AedOptions, ratio: float) -> bool:
    """Whether the text of a result repeats itself too much."""
    return options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold


def fails(options: AedOptions, attempt: Attempt[Result], no_speech_prob: float | None) -> bool:
    """Whether a result is bad enough to be decoded again; silence is not."""
    improbable = options.log_prob_threshold is not None and attempt.avg_log_prob < options.log_prob_threshold
    if improbable and is_silence(options, attempt.avg_log_prob, no_speech_prob):
        return False
    return improbable or is_too_repetitive(options, attempt.compression_ratio)


def best_attempt(options: AedOptions, attempts: Sequence[Attempt[Result]]) -> Attempt[Result]:
    """Where all temperatures failed: the most probable result among those that do not repeat themselves, else of all.

    Its temperature is the last one tried, which tells that no result was good.
    """
    modest = [attempt for attempt in attempts if not is_too_repetitive(options, attempt.compression_ratio)]
    best = max(modest or attempts, key=lambda attempt: attempt.avg_log_prob)
    return best._replace(temperature=attempts[-1].temperature)


def next_temperature(options: AedOptions, temperature: float) -> float | None:
    """The temperature to try after ``temperature``, ``None`` where there is none."""
    return next((higher for higher in options.temperature_fallback if higher > temperature), None)
