"""Reading and tidying the emitted tokens of the streams' alignments, compiled."""

from __future__ import annotations

import numpy as np

from oasr_core.compiled import compiled
from oasr_ctc.beams import Emissions, Prefixes
from oasr_ctc.prefix_search import Longs
from oasr_ctc.selection import Floats, Ints


@compiled
def trace(
    emissions: Emissions, ends: Longs, roots: Longs, bounds: Longs, tokens: Ints, frames: Ints, log_probs: Floats
) -> None:
    """Write out the emissions behind ``roots`` up to ``ends``; alignment ``i`` fills ``bounds[i]:bounds[i + 1]``."""
    for i in range(len(ends)):
        node = ends[i]
        place = bounds[i + 1]
        while node != roots[i]:
            place -= 1
            emission = emissions[node]
            tokens[place], frames[place], log_probs[place] = emission.token, emission.frame, emission.log_prob
            node = emission.parent


@compiled
def settle(
    slots: Longs, beams: Prefixes, sizes: Ints, frames: Longs, emissions: Emissions, roots: Longs, settled: Longs
) -> None:
    """Move each stream's root to the last emission that all its alignments share; what lies before can change no more.

    ``roots`` ``(slots,)`` are emissions, -1 in the beginning, ``settled`` ``(slots,)`` counts those up to the root. An
    emission whose posterior the next frame may raise stays behind the root.
    """
    for slot in slots:
        beam = beams[slot]
        shared, first = (-1), True
        for j in range(sizes[slot]):
            for nonblank in range(2):
                score = beam[j].best_nonblank if nonblank else beam[j].best_blank
                if score == -np.inf:
                    continue
                node = beam[j].emission_nonblank if nonblank else beam[j].emission_blank
                if first:
                    shared, first = node, False
                while shared != node:
                    if shared > node:
                        shared = int(emissions[shared].parent)
                    else:
                        node = int(emissions[node].parent)
        if shared >= 0 and emissions[shared].frame == frames[slot] - 1 and shared != roots[slot]:
            shared = int(emissions[shared].parent)
        if shared < 0 or shared == roots[slot]:
            continue
        node = shared
        while node != roots[slot]:
            settled[slot] += 1
            node = int(emissions[node].parent)
        emissions[shared].parent = -1
        roots[slot] = shared


@compiled
def mark(slots: Longs, beams: Prefixes, sizes: Ints, emissions: Emissions, used: int, roots: Longs) -> Ints:
    """New places, in order and without gaps, of the emissions that the streams ``slots`` still need; others have -1."""
    places = np.full(used, -1, np.int32)
    for slot in slots:
        if roots[slot] >= 0:
            places[roots[slot]] = 0
        for j in range(sizes[slot]):
            for node in (beams[slot, j].emission_blank, beams[slot, j].emission_nonblank):
                if node >= 0:
                    places[node] = 0
    for node in range(used - 1, -1, -1):
        if places[node] == 0 and emissions[node].parent >= 0:
            places[emissions[node].parent] = 0
    count = np.int32(0)
    for node in range(used):
        if places[node] == 0:
            places[node] = count
            count += np.int32(1)
    return places


@compiled
def move(
    slots: Longs, beams: Prefixes, sizes: Ints, emissions: Emissions, places: Ints, roots: Longs, target: Emissions
) -> None:
    """Copy the emissions that have a new place to ``target`` and point the streams at it."""
    for node in range(len(places)):
        if places[node] >= 0:
            target[places[node]] = emissions[node]
            if emissions[node].parent >= 0:
                target[places[node]].parent = places[emissions[node].parent]
    for slot in slots:
        if roots[slot] >= 0:
            roots[slot] = places[roots[slot]]
        for j in range(sizes[slot]):
            prefix = beams[slot, j]
            if prefix.emission_blank >= 0:
                prefix.emission_blank = places[prefix.emission_blank]
            if prefix.emission_nonblank >= 0:
                prefix.emission_nonblank = places[prefix.emission_nonblank]


@compiled
def agreed(slots: Longs, beams: Prefixes, sizes: Ints, emissions: Emissions, roots: Longs, settled: Longs) -> Longs:
    """For each of ``slots``, how many tokens all prefixes of its beam begin with alike."""
    counts = np.zeros(len(slots), np.int64)
    for i, slot in enumerate(slots):
        beam, root, before = beams[slot], roots[slot], settled[slot]
        alike = beam[0].length
        for j in range(1, sizes[slot]):
            first, second = _end(beam[0]), _end(beam[j])
            place, other = beam[0].length, beam[j].length
            alike = min(alike, other)
            while other > place:
                second, other = int(emissions[second].parent), other - 1
            while place > other:
                first, place = int(emissions[first].parent), place - 1
            while place > before and first != second and first != root:
                place -= 1
                if emissions[first].token != emissions[second].token:
                    alike = min(alike, place)
                first, second = int(emissions[first].parent), int(emissions[second].parent)
        counts[i] = alike
    return counts


@compiled
def _end(prefix: Prefixes) -> int:
    """The last emission of the best alignment of ``prefix``."""
    return int(prefix.emission_blank if prefix.best_blank > prefix.best_nonblank else prefix.emission_nonblank)
