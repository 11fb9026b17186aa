"""Times of words out of times of tokens: punctuation lasts no time, and words around pauses are not too long.

Attention puts a pause into a word beside it. As faster-whisper's ``add_word_timestamps`` does, such words are cut by
what words last in the same text, and by the times of their segment.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from oasr_core.decoding.alignment import word_spans
from oasr_core.decoding.base import TokenSpan

_SENTENCE_END = frozenset(".。!！?？")

#: No word counts as longer than this when the usual length of a word is found.
_MAX_MEDIAN = 0.7

#: A first or last word is cut by the time of its segment where it lies this much beyond.
_SEGMENT_SLACK = 0.5


@dataclass
class Word:
    """A word, or punctuation that was written beside one: tokens ``first`` to ``last`` (exclusive) of the text."""

    text: str
    first: int
    last: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start


def word_times(
    pieces: Sequence[str], starts: Sequence[float], segments: Sequence[TokenSpan]
) -> list[tuple[float, float]]:
    """Start and end seconds of each token.

    ``pieces`` are the tokens' strings, special tokens having none; ``starts`` one second more than there are tokens:
    where each begins, and where the last one ends. ``segments`` are spans over all tokens.
    """
    words = _words(pieces, starts)
    usual = _usual_duration(words)
    _cut_at_sentences(words, 2.0 * usual)
    spoken = [word for word in words if not _is_punctuation(word.text)]
    _cut_at_segments(spoken, segments, usual)
    return _token_times(pieces, starts, spoken)


def _words(pieces: Sequence[str], starts: Sequence[float]) -> list[Word]:
    """Words and punctuation in order; a token that holds a part of a character belongs to the word it is in."""
    bounds = {first for first, _ in word_spans("".join(pieces))}
    words: list[Word] = []
    position = 0
    for index, piece in enumerate(pieces):
        inside = range(position, position + len(piece))
        position += len(piece)
        begins = any(place in bounds for place in inside)
        is_mark = bool(piece.strip()) and _is_punctuation(piece)
        if not piece.strip() and not begins and words:
            words[-1].last, words[-1].end = index + 1, starts[index + 1]
        elif begins or is_mark or not words:
            words.append(Word(piece, index, index + 1, starts[index], starts[index + 1]))
        else:
            word = words[-1]
            word.text, word.last, word.end = word.text + piece, index + 1, starts[index + 1]
    return words


def _is_punctuation(text: str) -> bool:
    return all(unicodedata.category(char)[0] == "P" for char in text.strip())


def _usual_duration(words: Sequence[Word]) -> float:
    """The median of what words last, in seconds; 0 where none lasts any time."""
    lasting = [word.duration for word in words if word.duration > 0.0]
    return min(_MAX_MEDIAN, median(lasting)) if lasting else 0.0


def _cut_at_sentences(words: Sequence[Word], longest: float) -> None:
    """A mark that ends a sentence, and the word behind it, are no longer than ``longest`` seconds."""
    for before, word in pairwise(words):
        if longest <= 0.0 or word.duration <= longest:
            continue
        if word.text.strip() in _SENTENCE_END:
            word.end = word.start + longest
        elif before.text.strip() in _SENTENCE_END:
            word.start = word.end - longest


def _cut_at_segments(words: Sequence[Word], segments: Sequence[TokenSpan], usual: float) -> None:
    """Words behind a pause are cut at their beginning; first and last words keep to their segment."""
    said = 0.0
    for segment in segments:
        inside = [word for word in words if segment.first <= word.first < segment.last]
        if not inside:
            continue
        _cut_behind_pause(inside, said, usual)
        first, last = inside[0], inside[-1]
        if first.start + _SEGMENT_SLACK < segment.start < first.end:
            first.start = max(first.start, min(first.end - usual, segment.start))
        if last.start < segment.end < last.end - _SEGMENT_SLACK:
            last.end = min(last.end, max(last.start + usual, segment.end))
        said = last.end


def _cut_behind_pause(words: Sequence[Word], said: float, usual: float) -> None:
    """Cut the first word, and the second where it is too long as well, behind what was ``said`` until then."""
    longest = 2.0 * usual
    first, second = words[0], words[1] if len(words) > 1 else None
    if first.end - said <= 4.0 * usual:
        return
    if first.duration <= longest and (second is None or second.end - first.start <= 2.0 * longest):
        return
    if second is not None and second.duration > longest:
        first.end = second.start = max(second.end / 2.0, second.end - longest)
    first.start = max(0.0, first.end - longest)


def _token_times(pieces: Sequence[str], starts: Sequence[float], words: Sequence[Word]) -> list[tuple[float, float]]:
    """Times of tokens inside their words; those of no word take the end of the word before, or the first's start."""
    times: list[tuple[float, float]] = []
    here = words[0].start if words else (starts[0] if starts else 0.0)
    place = 0
    for index in range(len(pieces)):
        while place < len(words) and words[place].last <= index:
            place += 1
        word = words[place] if place < len(words) else None
        if word is None or index < word.first:
            times.append((here, here))
            continue
        start = word.start if index == word.first else min(max(starts[index], here), word.end)
        end = word.end if index == word.last - 1 else min(max(starts[index + 1], start), word.end)
        times.append((start, end))
        here = end
    return times
