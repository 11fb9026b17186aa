"""Outputs of windows, in order, become the one output of their request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import attrgetter

from oasr_core.decoding.alignment import word_spans
from oasr_core.longform.seam import Shared, find_seam, open_from
from oasr_core.longform.units import Unit, units_of
from oasr_core.request import RequestOutput, Segment, WordTiming
from oasr_core.tokenizers.base import Tokenizer

_PART = attrgetter("part")


@dataclass(slots=True)
class _Part:
    """What is kept of a window's output besides its units; seconds from the start of the audio."""

    start: float
    end: float
    segments: Sequence[Segment]
    score: float
    confidence: float | None
    language: str | None
    language_prob: float | None
    no_speech_prob: float | None
    temperature: float | None
    timed: bool
    worded: bool
    #: Whether a cap of tokens cut off text that nothing says again.
    length: bool = False
    #: The middles of the audio shared with the windows before and behind.
    cut_before: float = 0.0
    cut_after: float = float("inf")


@dataclass(slots=True)
class Stitcher:
    """Joins windows one behind another.

    Times become absolute, and never run backwards. Of a window's hypotheses the best counts; scores are summed. The
    confidence is the mean over the kept tokens' windows, the language that of most windows with text (the first of
    equals) with the probability of the first window in it, ``no_speech_prob`` that of the window that is least likely
    to be without speech, ``temperature`` the highest.
    """

    tokenizer: Tokenizer
    keep_words: bool = True
    units: list[Unit] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    unencoded: list[str] = field(default_factory=list)

    def append(
        self, output: RequestOutput, start: float, end: float, shared: float = 0.0, until: float | None = None
    ) -> list[int]:
        """Take the output of the window from ``start`` to ``end`` seconds; returns the ids that the window keeps.

        Its first ``shared`` seconds also end the window before: what both recognized there is kept once. Segments that
        begin ``until`` seconds into the window, or later, are left out: the next window says them, and what a cap of
        tokens cut off.
        """
        part = len(self.parts)
        units = units_of(output, self.tokenizer, part, start)
        tokens = list(output.tokens[0]) if output.tokens else []
        if until is not None and output.segments:
            first = next((i for i, u in enumerate(units) if output.segments[u.segment].start >= until), len(units))
            left_out = sum(len(unit.tokens) for unit in units[first:])
            del units[first:]
            tokens = _closed(tokens, len(tokens) - left_out, self.tokenizer)
        if not units:
            tokens = []  # timestamps around nothing
        joint = _part(output, start, end, bool(units))
        joint.length = output.finish_reason == "length" and until is None
        if shared > 0 and self.parts:
            overlap = Shared(start, start + shared)
            joint.cut_before = self.parts[-1].cut_after = overlap.middle
            keep, skip = find_seam(self.units, units, overlap)
            del self.units[keep:]
            del units[:skip]
        self.units += units
        self.parts.append(joint)
        self.unencoded += [phrase for phrase in output.unencoded_hotwords if phrase not in self.unencoded]
        return tokens

    def partial(self, request_id: str, next_start: float | None) -> RequestOutput:
        """What can no longer change; the next window begins at ``next_start`` (``None``: it shares no audio).

        Words, segments and confidence come with the result, as all partials leave them to the final.
        """
        kept = len(self.units)
        if next_start is not None and self.parts and next_start < self.parts[-1].end:
            kept = open_from(self.units, Shared(next_start, self.parts[-1].end))
        return self._output(request_id, self.units[:kept])

    def result(self, request_id: str) -> RequestOutput:
        """The terminal output."""
        units = self.units
        words = _words(units) if self.keep_words and any(part.worded for part in self.parts) else None
        return replace(
            self._output(request_id, units),
            finished=True,
            is_segment_final=True,
            segments=self._segments(units, words),
            words=words,
            confidence=self._confidence(units),
            finish_reason="length" if any(part.length for part in self.parts) else "stop",
        )

    def _output(self, request_id: str, units: Sequence[Unit]) -> RequestOutput:
        text = joined(units)
        languages = Counter(part.language for part in self.parts if part.language is not None)
        language = languages.most_common(1)[0][0] if languages else None
        return RequestOutput(
            request_id=request_id,
            text=text,
            tokens=[[token for unit in units for token in unit.tokens]],
            scores=[sum(part.score for part in self.parts)],
            stable_prefix_chars=len(text),
            timestamps=_rising(time for unit in units for time in unit.times)
            if all(part.timed for part in self.parts)
            else None,
            nbest_texts=[text],
            language=language,
            language_prob=next((part.language_prob for part in self.parts if part.language == language), None),
            no_speech_prob=min(
                (part.no_speech_prob for part in self.parts if part.no_speech_prob is not None), default=None
            ),
            temperature=max((part.temperature for part in self.parts if part.temperature is not None), default=None),
            unencoded_hotwords=list(self.unencoded),
        )

    def _confidence(self, units: Sequence[Unit]) -> float | None:
        total = weight = 0.0
        for part, members in groupby(units, key=_PART):
            confidence = self.parts[part].confidence
            if confidence is not None:
                count = sum(len(unit.tokens) for unit in members)
                total, weight = total + count * confidence, weight + count
        return total / weight if weight else None

    def _segments(self, units: Sequence[Unit], words: Sequence[WordTiming] | None) -> list[Segment]:
        """Segments of the kept units, each cut at the middle of shared audio."""
        segments: list[Segment] = []
        position = 0
        for (index, segment), group in groupby(units, key=lambda unit: (unit.part, unit.segment)):
            members, part = list(group), self.parts[index]
            count = sum(len(unit.words) for unit in members)
            own = None if words is None else tuple(words[position : position + count])
            position += count
            given = part.segments[segment] if part.segments else Segment("", 0.0, part.end - part.start)
            begin = min(max(part.start + given.start, part.cut_before), part.cut_after)
            end = max(min(part.start + given.end, part.cut_after), begin)
            segments.append(Segment(joined(members).strip(), begin, end, own))
        return segments


def _closed(tokens: list[int], count: int, tokenizer: Tokenizer) -> list[int]:
    """The first ``count`` tokens, and the one that closes them where it spells nothing: a timestamp."""
    if count < len(tokens) and count and not tokenizer.decode([tokens[count]]):
        count += 1
    return tokens[:count]


def joined(units: Sequence[Unit]) -> str:
    """The text of ``units``; between two windows a space stands where the script has spaces."""
    pieces: list[str] = []
    for _, members in groupby(units, key=_PART):
        piece = "".join([unit.text for unit in members])
        if pieces and _needs_space(pieces[-1][-1:], piece[:1]):
            pieces.append(" ")
        pieces.append(piece)
    return "".join(pieces)


def _needs_space(before: str, after: str) -> bool:
    return len(word_spans(before + after)) == 1 and not (before.isspace() or after.isspace())


def _part(output: RequestOutput, start: float, end: float, spoken: bool) -> _Part:
    return _Part(
        start=start,
        end=end,
        segments=output.segments,
        score=output.scores[0] if output.scores else 0.0,
        confidence=output.confidence,
        language=output.language if spoken else None,
        language_prob=output.language_prob,
        no_speech_prob=output.no_speech_prob,
        temperature=output.temperature,
        timed=output.timestamps is not None or not spoken,
        worded=output.words is not None,
    )


def _words(units: Sequence[Unit]) -> list[WordTiming]:
    """Words in order; one that reaches into the next window's first word ends there."""
    words: list[WordTiming] = []
    latest = 0.0
    for unit in units:
        for word in unit.words:
            if words and words[-1].end > word.start:
                words[-1] = replace(words[-1], end=max(word.start, words[-1].start))
            start = max(word.start, latest)
            words.append(replace(word, start=start, end=max(word.end, start)))
            latest = start
    return words


def _rising(times: Iterable[float]) -> list[float]:
    return list(accumulate(times, max))
