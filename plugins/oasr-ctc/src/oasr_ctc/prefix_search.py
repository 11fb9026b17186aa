"""CTC prefix beam search, compiled: advances the beams of many streams through their frames."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from oasr_core.compiled import compiled
from oasr_core.decoding.context import ContextArrays
from oasr_ctc.beams import PREFIX, Emissions, Prefixes
from oasr_ctc.selection import SKIPPED, Floats, Ints

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

_INF = np.inf
_NO_TOKEN = -1  # in place of a candidate's token: the prefix stays as it is

#: Multipliers of the hash of a prefix; ``tensor_search`` computes the same.
HASH_FIRST = 0x2545F4914F6CDD1D
HASH_SECOND = 0x4F1BBCDCBFA53E0B


@compiled
def search(
    log_probs: Floats,
    lengths: Longs,
    labels: Ints,
    label_counts: Ints,
    blank: int,
    only_labels: bool,
    max_length: int,
    graph: ContextArrays,
    rows: Longs,
    slots: Longs,
    beams: Prefixes,
    sizes: Ints,
    frames: Longs,
    emissions: Emissions,
    used: int,
    row: int,
    frame: int,
) -> tuple[int, int, int]:
    """Advance the streams ``slots`` by the frames of their ``rows`` of ``log_probs`` ``(batch, frames, vocab)``.

    ``labels`` and ``label_counts`` are those of ``select_labels``; with ``only_labels`` no other label is considered,
    else they must be enough for the search to be exact. Prefixes of ``max_length`` tokens are not extended. ``beams``
    ``(slots, beam)`` holds each stream's prefixes, best first, ``sizes`` ``(slots,)`` how many, ``frames`` ``(slots,)``
    the frames that each has seen; ``emissions`` is filled up to ``used``.

    Begins in ``frame`` of the ``row``-th stream and returns the place where it stopped: behind the last stream, or
    where ``emissions`` is full, and how far it is filled.
    """
    beam_size = beams.shape[1]
    following = np.empty(beam_size, PREFIX)
    totals, stay_blank, stay_nonblank = np.empty(beam_size), np.empty(beam_size), np.empty(beam_size)
    parents, last_scores = np.empty(beam_size, np.int64), np.empty(beam_size)
    scores, origins = np.empty(beam_size), np.empty(beam_size, np.int64)
    tokens, token_scores = np.empty(beam_size, np.int64), np.empty(beam_size)
    while row < len(rows):
        batch_row, slot = rows[row], slots[row]
        beam = beams[slot]
        while frame < lengths[batch_row]:
            posteriors = log_probs[batch_row, frame]
            size = sizes[slot]
            if label_counts[batch_row, frame] <= 0:
                skipped = label_counts[batch_row, frame] == SKIPPED and posteriors[blank] > -_INF
                _raise_posteriors(beam, size, posteriors, frames[slot], emissions)
                _collapse(beam, size, frames[slot], posteriors[blank] if skipped else 0.0)
            else:
                if used + beam_size > len(emissions):
                    return row, frame, used
                _raise_posteriors(beam, size, posteriors, frames[slot], emissions)
                allowed = labels[batch_row, frame, : label_counts[batch_row, frame]]
                # 1. What every prefix becomes where nothing is appended, and by what is appended to its parent.
                blank_score = _score(posteriors, blank, allowed, only_labels)
                found = 0
                for j in range(size):
                    totals[j] = _log_add(beam[j].blank, beam[j].nonblank)
                for j in range(size):
                    stay_blank[j] = totals[j] + blank_score
                    stay_nonblank[j] = -_INF
                    parents[j] = -1
                    last_scores[j] = -_INF
                    if beam[j].length > 0:
                        last_score = last_scores[j] = _score(posteriors, beam[j].last, allowed, only_labels)
                        stay_nonblank[j] = beam[j].nonblank + last_score
                        for i in range(size):
                            if beam[i].hash == beam[j].parent_hash and beam[i].length + 1 == beam[j].length:
                                parents[j] = i
                                source = beam[i].blank if beam[i].last == beam[j].last else totals[i]
                                stay_nonblank[j] = _log_add(stay_nonblank[j], source + last_score)
                    score = _log_add(stay_blank[j], stay_nonblank[j]) + beam[j].kept + beam[j].pending
                    found = _offer(scores, origins, tokens, token_scores, found, score, j, _NO_TOKEN, 0.0)
                # 2. New prefixes.
                for i in range(size):
                    if beam[i].length < max_length:
                        found = _extend(
                            beam, size, i, totals[i], posteriors, allowed, only_labels, blank, graph,
                            scores, origins, tokens, token_scores, found,
                        )  # fmt: skip
                # 3. The best of both, with their alignments.
                for k in range(found):
                    i = origins[k]
                    if tokens[k] == _NO_TOKEN:
                        used = _stay(
                            beam, i, parents[i], following[k], stay_blank[i], stay_nonblank[i], blank_score,
                            last_scores[i], frames[slot], emissions, used,
                        )  # fmt: skip
                    else:
                        used = _append(
                            beam[i], totals[i], tokens[k], token_scores[k], following[k], graph, frames[slot],
                            emissions, used,
                        )  # fmt: skip
                for k in range(found):
                    beam[k] = following[k]
                if found > 0:
                    sizes[slot] = found
                else:  # a cap on tokens left no way to go on
                    _collapse(beam, size, frames[slot], 0.0)
            frames[slot] += 1
            frame += 1
        frame = 0
        row += 1
    return row, frame, used


@compiled
def _extend(
    beam: Prefixes,
    size: int,
    origin: int,
    total: float,
    posteriors: Floats,
    allowed: Ints,
    only_labels: bool,
    blank: int,
    graph: ContextArrays,
    scores: Doubles,
    origins: Longs,
    tokens: Longs,
    token_scores: Doubles,
    found: int,
) -> int:
    """Offer the extensions of one prefix that are no prefix of the beam yet; returns the number of candidates.

    Tokens that continue no phrase change the context score by the same amount, so that the best of them are the best
    labels; those that continue one are the arcs of the state and of its fail states.
    """
    prefix = beam[origin]
    full = len(scores)
    kept, root = prefix.kept, graph.fail[prefix.state] < 0
    for place in range(len(allowed)):
        token = allowed[place]
        if token == blank:
            continue
        if found == full and total + posteriors[token] + kept < scores[full - 1]:
            break
        source = prefix.blank if token == prefix.last else total
        score = source + posteriors[token] + kept
        if (found < full or score >= scores[full - 1]) and not _in_beam(beam, size, prefix, token):
            if len(graph.arc_token) > 0 and _follow(graph, prefix.state, token) > 0:
                continue
            found = _offer(scores, origins, tokens, token_scores, found, score, origin, token, posteriors[token])
    state = prefix.state
    while state >= 0:
        for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
            token, target = graph.arc_token[arc], graph.arc_target[arc]
            source = prefix.blank if token == prefix.last else total
            token_score = _score(posteriors, token, allowed, only_labels)
            score = source + token_score + kept + graph.reward[target] + graph.pending[target]
            if found == full and score < scores[full - 1]:
                continue
            shadowed = not root and _follow(graph, prefix.state, token) != target
            if not shadowed and not _in_beam(beam, size, prefix, token):
                found = _offer(scores, origins, tokens, token_scores, found, score, origin, token, token_score)
        state = graph.fail[state]
    return found


@compiled
def _offer(
    scores: Doubles,
    origins: Longs,
    tokens: Longs,
    token_scores: Doubles,
    found: int,
    score: float,
    origin: int,
    token: int,
    token_score: float,
) -> int:
    """Put a candidate at its place among the best; returns how many there are.

    Of equal scores, prefixes that are in the beam come first, in their order; then new ones, in the order of the prefix
    that they extend, by the posterior of the token and by its id.
    """
    if score == -_INF:
        return found
    full = len(scores)
    place = found if found < full else full - 1
    if found == full and not _precedes(
        score, origin, token, token_score, scores[place], origins[place], tokens[place], token_scores[place]
    ):
        return found
    while place > 0 and _precedes(
        score, origin, token, token_score,
        scores[place - 1], origins[place - 1], tokens[place - 1], token_scores[place - 1],
    ):  # fmt: skip
        scores[place], origins[place] = scores[place - 1], origins[place - 1]
        tokens[place], token_scores[place] = tokens[place - 1], token_scores[place - 1]
        place -= 1
    scores[place], origins[place], tokens[place], token_scores[place] = score, origin, token, token_score
    return min(found + 1, full)


@compiled
def _precedes(
    score: float,
    origin: int,
    token: int,
    token_score: float,
    other_score: float,
    other_origin: int,
    other_token: int,
    other_token_score: float,
) -> bool:
    if score != other_score:
        return score > other_score
    if (token == _NO_TOKEN) != (other_token == _NO_TOKEN):
        return token == _NO_TOKEN
    if origin != other_origin:
        return origin < other_origin
    if token_score != other_token_score:
        return token_score > other_token_score
    return token < other_token


@compiled
def _stay(
    beam: Prefixes,
    index: int,
    parent: int,
    result: Prefixes,
    blank_total: float,
    nonblank_total: float,
    blank_score: float,
    last_score: float,
    frame: int,
    emissions: Emissions,
    used: int,
) -> int:
    """Write to ``result`` what a prefix becomes to which nothing is appended; returns how far emissions are filled."""
    prefix = beam[index]
    result.hash, result.parent_hash, result.last, result.length = (
        prefix.hash, prefix.parent_hash, prefix.last, prefix.length,
    )  # fmt: skip
    result.state, result.kept, result.pending = prefix.state, prefix.kept, prefix.pending
    result.blank, result.nonblank = blank_total, nonblank_total
    if prefix.best_blank > prefix.best_nonblank:
        result.best_blank, result.emission_blank = prefix.best_blank + blank_score, prefix.emission_blank
        result.spoken = prefix.spoken
    else:
        result.best_blank, result.emission_blank = prefix.best_nonblank + blank_score, prefix.emission_nonblank
        result.spoken = frame - 1
    result.best_nonblank, result.emission_nonblank = prefix.best_nonblank + last_score, prefix.emission_nonblank
    if parent >= 0:
        best, emission = _best_source(beam[parent], prefix.last)
        if best + last_score > result.best_nonblank:
            result.best_nonblank, result.emission_nonblank = best + last_score, used
            _emit(emissions, used, emission, prefix.last, frame, last_score)
            used += 1
    if result.best_blank == -_INF:
        result.emission_blank = -1
    if result.best_nonblank == -_INF:
        result.emission_nonblank = -1
    return used


@compiled
def _append(
    prefix: Prefixes,
    total: float,
    token: int,
    token_score: float,
    result: Prefixes,
    graph: ContextArrays,
    frame: int,
    emissions: Emissions,
    used: int,
) -> int:
    """Write to ``result`` the prefix with ``token`` appended; returns how far emissions are filled."""
    result.hash, result.parent_hash = _hash(prefix.hash, token), prefix.hash
    result.last, result.length = token, prefix.length + 1
    result.state = _follow(graph, prefix.state, token)
    result.kept, result.pending = prefix.kept + graph.reward[result.state], graph.pending[result.state]
    result.blank, result.nonblank = -_INF, (prefix.blank if token == prefix.last else total) + token_score
    best, emission = _best_source(prefix, token)
    result.best_blank, result.emission_blank, result.spoken = -_INF, -1, -1
    result.best_nonblank, result.emission_nonblank = best + token_score, used
    _emit(emissions, used, emission, token, frame, token_score)
    return used + 1


@compiled
def _best_source(prefix: Prefixes, token: int) -> tuple[float, int]:
    """The best alignment of ``prefix`` that ``token`` may be appended to: log probability, last emission."""
    if token == prefix.last or prefix.best_blank > prefix.best_nonblank:
        return prefix.best_blank, prefix.emission_blank
    return prefix.best_nonblank, prefix.emission_nonblank


@compiled
def _emit(emissions: Emissions, place: int, parent: int, token: int, frame: int, log_prob: float) -> None:
    emission = emissions[place]
    emission.parent, emission.token, emission.frame, emission.log_prob = parent, token, frame, log_prob


@compiled
def _collapse(beam: Prefixes, size: int, frame: int, blank_score: float) -> None:
    """A frame of blank alone: every alignment ends in blank behind it."""
    for j in range(size):
        prefix = beam[j]
        prefix.blank, prefix.nonblank = _log_add(prefix.blank, prefix.nonblank) + blank_score, -_INF
        if prefix.best_blank <= prefix.best_nonblank:
            prefix.best_blank, prefix.emission_blank = prefix.best_nonblank, prefix.emission_nonblank
            prefix.spoken = frame - 1
        prefix.best_blank += blank_score
        prefix.best_nonblank = -_INF
        prefix.emission_nonblank = -1


@compiled
def _raise_posteriors(beam: Prefixes, size: int, posteriors: Floats, frame: int, emissions: Emissions) -> None:
    """Tokens that were emitted in the frame before take the larger posterior of both frames."""
    for j in range(size):
        if beam[j].emission_nonblank >= 0:
            emission = emissions[beam[j].emission_nonblank]
            if emission.frame == frame - 1:
                emission.log_prob = max(emission.log_prob, posteriors[emission.token])


@compiled
def _in_beam(beam: Prefixes, size: int, prefix: Prefixes, token: int) -> bool:
    extended = _hash(prefix.hash, token)
    for j in range(size):  # noqa: SIM110 - compiled, a generator expression is slower
        if beam[j].hash == extended and beam[j].length == prefix.length + 1:
            return True
    return False


@compiled
def _hash(prefix: int, token: int) -> int:
    mixed = (prefix + token + 1) * HASH_FIRST
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    return mixed * HASH_SECOND


@compiled
def _score(posteriors: Floats, token: int, allowed: Ints, only_labels: bool) -> float:
    """The log posterior of ``token``; -inf where only the allowed labels are considered and it is not one."""
    if only_labels:
        for label in allowed:
            if label == token:
                return float(posteriors[token])
        return -_INF
    return float(posteriors[token])


@compiled
def _follow(graph: ContextArrays, state: int, token: int) -> int:
    while state >= 0:
        low, high = graph.arc_begin[state], graph.arc_begin[state + 1]
        while low < high:
            middle = (low + high) // 2
            if graph.arc_token[middle] < token:
                low = middle + 1
            else:
                high = middle
        if low < graph.arc_begin[state + 1] and graph.arc_token[low] == token:
            return int(graph.arc_target[low])
        state = int(graph.fail[state])
    return 0


@compiled
def _log_add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == -_INF else a + math.log1p(math.exp(b - a))
