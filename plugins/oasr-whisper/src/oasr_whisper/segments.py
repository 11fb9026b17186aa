"""The segments that timestamp tokens mark, and how much of the audio they account for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from oasr_core.decoding.base import TokenSpan
from oasr_whisper.config import TIMESTAMP_SECONDS


class Segmentation(NamedTuple):
    """Spans over all tokens, and the seconds that the complete ones account for (``None``: all of the audio).

    Tokens behind the last complete segment make a last span, which begins where ``consumed_seconds`` says: decoding
    that goes on from there says them again.
    """

    spans: list[TokenSpan]
    consumed_seconds: float | None


def segment(tokens: Sequence[int], timestamp_begin: int, duration: float) -> Segmentation:
    """Cut ``tokens`` after each first timestamp of a pair; ``duration`` are the seconds of the audio.

    The rules are those of OpenAI's ``transcribe``: text that ends with a single timestamp is complete, and nothing was
    said after it; else the last pair is where the next window begins. Without a pair all is one segment.
    """
    cuts = [
        index
        for index in range(1, len(tokens))
        if tokens[index] >= timestamp_begin and tokens[index - 1] >= timestamp_begin
    ]
    ends_single = len(tokens) >= 2 and tokens[-2] < timestamp_begin <= tokens[-1]
    if not cuts:
        return Segmentation([_span(tokens, 0, len(tokens), timestamp_begin, 0.0, duration)] if tokens else [], None)
    edges = [0, *cuts, len(tokens)] if ends_single else [0, *cuts]
    spans = [_span(tokens, first, last, timestamp_begin, 0.0, duration) for first, last in pairwise(edges)]
    if ends_single:
        return Segmentation(spans, None)
    consumed = _seconds(tokens[cuts[-1] - 1], timestamp_begin)
    spans.append(_span(tokens, cuts[-1], len(tokens), timestamp_begin, consumed, duration, begin=consumed))
    # A pair at <|0.00|> accounts for nothing: going on from there would not end.
    return Segmentation(spans, consumed if 0.0 < consumed < duration else None)


def _span(
    tokens: Sequence[int],
    first: int,
    last: int,
    timestamp_begin: int,
    start: float,
    end: float,
    begin: float | None = None,
) -> TokenSpan:
    """A span from its first timestamp to its last, as far as it has them; else from ``start`` to ``end``."""
    if tokens[first] >= timestamp_begin and begin is None:
        start = _seconds(tokens[first], timestamp_begin)
    stamps = [token for token in tokens[first + 1 : last] if token >= timestamp_begin]
    if stamps:
        end = _seconds(stamps[-1], timestamp_begin)
    return TokenSpan(first, last, start, max(start, end))


def _seconds(token: int, timestamp_begin: int) -> float:
    return round((token - timestamp_begin) * TIMESTAMP_SECONDS, 2)
