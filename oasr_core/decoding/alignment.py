"""Words with times: cut out of the final text, timed by the tokens that they are made of."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from statistics import fmean

from oasr_core.request import WordTiming

#: Han, kana, bopomofo and Hangul syllables: scripts in which each character is timed by itself.
_CHARACTER_WORD = re.compile(
    "[\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)

Span = tuple[int, int]
Seconds = tuple[float, float]


def word_spans(text: str) -> list[Span]:
    """Character ranges of the words of ``text``, in order.

    A word is a maximal run without whitespace; a Han, kana or Hangul character is a word of its own, together with the
    marks and the closing punctuation behind it and the opening punctuation before it.
    """
    spans: list[Span] = []
    begin: int | None = None
    single = opening = False  # the open word is one character of such a script; it is opening punctuation so far
    for position, char in enumerate(text):
        if char.isspace():
            if begin is not None:
                spans.append((begin, position))
            begin = None
            continue
        is_single = _CHARACTER_WORD.match(char) is not None
        category = unicodedata.category(char)
        opens = category in ("Ps", "Pi")
        trails = category[0] == "M" or (category[0] == "P" and not opens)
        if begin is not None and ((is_single and not opening) or (single and not is_single and not trails)):
            spans.append((begin, position))
            begin = None
        if begin is None:
            begin, single, opening = position, is_single, opens
        else:
            single, opening = single or is_single, opening and opens
    if begin is not None:
        spans.append((begin, len(text)))
    return spans


def token_times(
    frames: Sequence[int], frame_seconds: float, duration: float, end_frames: Sequence[int] | None = None
) -> list[Seconds]:
    """Start and end seconds of tokens first emitted in ``frames`` (encoder frames of ``frame_seconds``).

    A token lasts until its entry of ``end_frames``, one frame where there are none; less where the next token or the
    end of the audio (``duration`` seconds) comes sooner.
    """
    if end_frames is None:
        end_frames = [frame + 1 for frame in frames]
    starts = [min(seconds(frame, frame_seconds), duration) for frame in frames]
    limits = [*starts, duration][1:]
    return [
        (start, max(start, min(seconds(end, frame_seconds), limit)))
        for end, start, limit in zip(end_frames, starts, limits, strict=True)
    ]


def seconds(frame: int, frame_seconds: float) -> float:
    """Start of encoder frame ``frame``, without the noise digits of the product."""
    return round(int(frame) * frame_seconds, 6)


def align_words(
    text: str,
    pieces: Sequence[str],
    times: Sequence[Seconds],
    posteriors: Sequence[float] | None,
    is_partial: Callable[[int], bool],
) -> list[WordTiming]:
    """Words of ``text`` with the times and the mean posterior of their tokens.

    ``pieces`` are the tokens' strings (their concatenation is ``text``), ``times`` their seconds. A token with an empty
    piece belongs to the next piece where ``is_partial(index)`` says that it holds a part of a character, else to no
    word. A token that reaches over several words gives each an even share of its time.
    """
    spans = word_spans(text)
    starts = [0.0] * len(spans)
    ends = [0.0] * len(spans)
    members: list[list[int]] = [[] for _ in spans]
    position = word = 0
    held: list[int] = []
    for index, piece in enumerate(pieces):
        if not piece:
            if is_partial(index):
                held.append(index)
            continue
        while word < len(spans) and spans[word][1] <= position:
            word += 1
        position += len(piece)
        touched = [w for w in range(word, min(word + len(piece), len(spans))) if spans[w][0] < position]
        begin, end = times[index]
        share = (end - begin) / max(len(touched), 1)
        for order, w in enumerate(touched):
            owned = [*held, index] if order == 0 else [index]
            if not members[w]:
                starts[w] = times[owned[0]][0] if order == 0 else begin + order * share
            ends[w] = end if w == touched[-1] else begin + (order + 1) * share
            members[w] += owned
        held = []
    return [
        WordTiming(
            text[first:last], start, end, fmean(posteriors[i] for i in owned) if posteriors is not None else None
        )
        for (first, last), start, end, owned in zip(spans, starts, ends, members, strict=True)
    ]
