"""Where two windows that share audio are joined: the words that both recognized, found by alignment.

The end of the window before and the head of the window behind are aligned like two sequences that overlap. Words match
when they spell nearly the same and, where both have times, were said at about the same time. The cut lies behind the
matched word that is nearest to the middle of the shared audio: what a window recognized there it saw with context on
both sides, while words that its edge cut through are dropped with the rest of its half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from oasr_core.longform.units import Unit

#: Most words of each side that are compared.
MAX_WORDS = 40

#: Without times: words that may have been said in a second, and words that are compared on top of that.
_WORDS_PER_SECOND, _SPARE_WORDS = 4.0, 2
#: Seconds beyond the shared audio in which a word of it may seem to lie.
_SLACK = 0.5
#: A match loses its weight linearly over this difference of times; up to `_SLACK` a remainder stays.
_TIME_SCALE, _LEAST_WEIGHT = 0.25, 0.1
#: Likeness from which on two spellings match, and the weight of such a match.
_ALIKE, _ALIKE_WEIGHT = 0.75, 0.6
#: Shorter words match only themselves. Of longer ones a beginning (at the end of a window) or an end (at its head)
#: matches the whole word, too.
_FRAGMENT = 4
#: Cost of a word that only one side has, between matches and at the edges; higher where no times tell what may match.
_TIMED_COSTS, _UNTIMED_COSTS = (0.3, 0.2), (0.8, 0.4)


@dataclass(frozen=True, slots=True)
class Shared:
    """Audio in two windows, seconds from the start of the request's audio."""

    start: float
    end: float

    @property
    def middle(self) -> float:
        """Where neither window's edge is near."""
        return (self.start + self.end) / 2


@dataclass(frozen=True, slots=True)
class _Match:
    before: int
    after: int
    exact: bool


def open_from(before: Sequence[Unit], shared: Shared) -> int:
    """Index of the first unit of a window that the next seam may still take back."""
    first = max(len(before) - MAX_WORDS, 0)
    if before and before[-1].start is None:
        return max(len(before) - _likely_words(shared), first)
    while first < len(before) and _end(before[first]) <= shared.start - _SLACK:
        first += 1
    return first


def find_seam(before: Sequence[Unit], after: Sequence[Unit], shared: Shared) -> tuple[int, int]:
    """How many units of ``before`` are kept, and how many of ``after`` are dropped.

    Where no word matches, units with times are cut at the middle of the shared audio where both sides have some, and
    units without times are all kept.
    """
    first = open_from(before, shared)
    tail, head = before[first:], after[: _head(after, shared)]
    matches = _align(tail, head)
    if matches:
        match = _central(matches, tail, shared)
        # The end of a window cuts its last word short; the window behind has it whole.
        cut_off = match.before == len(tail) - 1 and len(tail[-1].key) < len(head[match.after].key)
        return first + match.before + (not cut_off), match.after + (not cut_off)
    if _timed(tail, head):
        keep, skip = _cut_by_time(tail, head, shared.middle)
        return first + keep, skip
    return len(before), 0


def _likely_words(shared: Shared) -> int:
    return min(math.ceil((shared.end - shared.start) * _WORDS_PER_SECOND) + _SPARE_WORDS, MAX_WORDS)


def _head(after: Sequence[Unit], shared: Shared) -> int:
    if after and after[0].start is None:
        return min(_likely_words(shared), len(after))
    count = 0
    while count < min(len(after), MAX_WORDS) and _start(after[count]) < shared.end + _SLACK:
        count += 1
    return count


def _align(tail: Sequence[Unit], head: Sequence[Unit]) -> list[_Match]:
    """Matches of the best alignment of an end of ``tail`` with a beginning of ``head``; none where all are bad."""
    rows, columns = len(tail), len(head)
    weights = _weights(tail, head)
    gap, edge = _TIMED_COSTS if _timed(tail, head) else _UNTIMED_COSTS
    score = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    came: list[list[str]] = [["begin"] * (columns + 1) for _ in range(rows + 1)]
    best, place = 0.0, (0, 0)
    for i in range(rows + 1):
        for j in range(columns + 1):
            ways = [(-edge * j, "begin")]
            if i and j:
                weight = weights[i - 1][j - 1]
                ways.append((score[i - 1][j - 1] + (weight or -gap), "match" if weight else "replace"))
            if i:
                ways.append((score[i - 1][j] - gap, "before"))
            if j:
                ways.append((score[i][j - 1] - gap, "after"))
            score[i][j], came[i][j] = max(ways, key=lambda way: way[0])
            total = score[i][j] - edge * (rows - i)
            if came[i][j] == "match" and total > best:
                best, place = total, (i, j)
    return _trace(came, place, tail, head)


def _trace(came: list[list[str]], place: tuple[int, int], tail: Sequence[Unit], head: Sequence[Unit]) -> list[_Match]:
    matches = []
    i, j = place
    while came[i][j] != "begin":
        way = came[i][j]
        i, j = i - (way != "after"), j - (way != "before")
        if way == "match":
            matches.append(_Match(i, j, tail[i].key == head[j].key))
    return matches[::-1]


def _weights(tail: Sequence[Unit], head: Sequence[Unit]) -> list[list[float]]:
    """How well each unit of ``tail`` matches each of ``head``, 0 where not at all."""
    heads = [unit.key for unit in head]
    table = []
    for i, unit in enumerate(tail):
        key = unit.key
        row = []
        for j, other in enumerate(heads):
            weight = _time_weight(unit.start, head[j].start)
            if weight:
                weight *= _spelling_weight(key, other, ends=i == len(tail) - 1, begins=j == 0)
            row.append(weight)
        table.append(row)
    return table


def _time_weight(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 1.0
    apart = abs(one - other)
    return max(1.0 - apart / _TIME_SCALE, _LEAST_WEIGHT) if apart <= _SLACK else 0.0


def _spelling_weight(key: str, other: str, *, ends: bool, begins: bool) -> float:
    if key == other:
        return 1.0
    if min(len(key), len(other)) < _FRAGMENT:
        return 0.0
    if ends and other.startswith(key):
        return _ALIKE_WEIGHT
    if begins and key.endswith(other):
        return _ALIKE_WEIGHT
    matcher = SequenceMatcher(None, key, other, autojunk=False)
    alike = matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE
    return _ALIKE_WEIGHT if alike else 0.0


def _central(matches: Sequence[_Match], tail: Sequence[Unit], shared: Shared) -> _Match:
    """The match nearest to the middle of the shared audio, one that is spelled alike if there is any."""
    pool = [match for match in matches if match.exact] or list(matches)
    if tail[0].start is None:
        return pool[len(pool) // 2]
    return min(pool, key=lambda match: abs(_centre(tail[match.before]) - shared.middle))


def _cut_by_time(tail: Sequence[Unit], head: Sequence[Unit], middle: float) -> tuple[int, int]:
    """Drop what each side has in the other's half of the shared audio, where the other has something too."""
    keep = next((i for i, unit in enumerate(tail) if _centre(unit) >= middle), len(tail))
    skip = next((i for i, unit in enumerate(head) if _centre(unit) >= middle), len(head))
    late = any(_start(other) < _end(tail[-1]) for other in head[skip:])
    early = any(_end(other) > _start(head[0]) for other in tail[:keep])
    return (keep if late else len(tail)), (skip if early else 0)


def _timed(tail: Sequence[Unit], head: Sequence[Unit]) -> bool:
    return bool(tail and head) and tail[0].start is not None and head[0].start is not None


def _start(unit: Unit) -> float:
    return unit.start if unit.start is not None else 0.0


def _end(unit: Unit) -> float:
    return unit.end if unit.end is not None else 0.0


def _centre(unit: Unit) -> float:
    return (_start(unit) + _end(unit)) / 2
