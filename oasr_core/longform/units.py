"""Outputs of windows, cut where tokens and words both end: what can be kept or dropped as a whole."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from oasr_core.decoding.alignment import word_spans
from oasr_core.request import RequestOutput, Segment, WordTiming
from oasr_core.tokenizers.base import Tokenizer


@dataclass(slots=True)
class Unit:
    """One word, mostly: the fewest whole tokens that spell whole words.

    ``text`` holds the space before the word. Times are seconds from the start of the request's audio; ``part`` counts
    the windows, ``segment`` the segments of the window.
    """

    text: str
    part: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    words: list[WordTiming] = field(default_factory=list)
    segment: int = 0

    @property
    def start(self) -> float | None:
        """When the first word begins; ``None`` without times."""
        if self.words:
            return self.words[0].start
        return self.times[0] if self.times else None

    @property
    def end(self) -> float | None:
        """When the last word ends; where only tokens have times, when the last token begins."""
        if self.words:
            return self.words[-1].end
        return self.times[-1] if self.times else None

    @property
    def key(self) -> str:
        """What is compared: letters and digits without case."""
        folded = unicodedata.normalize("NFKC", self.text).casefold()
        return "".join(char for char in folded if char.isalnum()) or folded.strip()


def units_of(output: RequestOutput, tokenizer: Tokenizer, part: int, offset: float) -> list[Unit]:
    """Units of the best hypothesis of a window that begins ``offset`` seconds into the audio."""
    tokens = output.tokens[0] if output.tokens else []
    starts = output.timestamps if output.timestamps and len(output.timestamps) == len(tokens) else None
    units: list[Unit] = []
    held = Unit("", part)
    pieces = tokenizer.token_pieces(tokens) if tokens else _words_of(output.text)
    for index, (piece, whole) in enumerate(_pieces(pieces)):
        held.text += piece
        held.tokens += tokens[index : index + 1]
        if starts is not None:
            held.times.append(offset + starts[index])
        if whole:
            units.append(held)
            held = Unit("", part)
    if units:  # tokens behind the last word
        units[-1].text += held.text
        units[-1].tokens += held.tokens
        units[-1].times += held.times
    for word, unit in _owners([word.word for word in output.words or ()], units):
        given = (output.words or ())[word]
        unit.words.append(WordTiming(given.word, offset + given.start, offset + given.end, given.confidence))
    _assign_segments(units, output.segments)
    return units


def _words_of(text: str) -> list[str]:
    """``text`` cut behind its words, for an output that has no tokens."""
    ends = [end for _, end in word_spans(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _pieces(pieces: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether a unit ends behind it: there are words before, and no word goes on."""
    spans = word_spans("".join(pieces))
    position = word = 0
    spelled = False
    for piece in pieces:
        position += len(piece)
        while word < len(spans) and spans[word][1] <= position:
            word, spelled = word + 1, True
        whole = spelled and (word == len(spans) or spans[word][0] >= position)
        yield piece, whole
        spelled = spelled and not whole


def _owners(parts: Sequence[str], units: Sequence[Unit]) -> Iterator[tuple[int, Unit]]:
    """Each of ``parts``, which spell what ``units`` spell, with the unit that holds its first character."""
    ends = list(accumulate(_letters(unit.text) for unit in units))
    position = 0
    for index, part in enumerate(parts):
        owner = bisect_right(ends, position)
        if owner < len(units):
            yield index, units[owner]
        position += _letters(part)


def _assign_segments(units: Sequence[Unit], segments: Sequence[Segment]) -> None:
    """Give each unit the segment that holds its first character; the last one takes what segments do not spell."""
    ends = list(accumulate(_letters(segment.text) for segment in segments))
    position = 0
    for unit in units:
        unit.segment = max(min(bisect_right(ends, position), len(ends) - 1), 0)
        position += _letters(unit.text)


def _letters(text: str) -> int:
    return sum(not char.isspace() for char in text)
