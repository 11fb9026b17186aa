"""The inner loop of the search, compiled: tokens pass over the arcs of the graph, frame by frame.

Compiled functions that call one another share this file: what numba keeps on disk of a caller is renewed when the
caller's own file changes, not when that of a function it calls does.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from oasr_core.compiled import compiled
from oasr_wfst.beam import BeamRules
from oasr_wfst.graph import FINAL
from oasr_wfst.prefetch import prefetch
from oasr_wfst.tokens import (
    ACTIVE,
    BASE,
    DEAD,
    NEEDED,
    NO_ARC,
    ROOT,
    ROOT_STEP,
    STEP,
    USED,
    Arcs,
    Doubles,
    Floats,
    Ints,
    Longs,
    Records,
    Scratch,
)

#: How a search ended: all frames done, or room lacking for tokens or records before the frame ``counters[STEP]``.
DONE: Final = 0
TOKENS_FULL: Final = 1
RECORDS_FULL: Final = 2

#: Beam of the step into the super-final state, which prunes nothing.
FINAL_BEAM: Final = 1.0e10

#: Tokens between asking for a token's arcs and reading them.
_AHEAD: Final = 8

#: A sum of scores may round upwards by less than this.
_SLACK: Final = 1e-3


@compiled
def next_beam(beam: float, active: int, step: int, total: int, rules: BeamRules) -> float:
    """The beam of a step, from that of the step before: the rules of k2's ``intersect_dense_pruned``.

    ``active`` states are about to be left in step ``step``, counted from 0; ``total`` frames come before the step into
    the super-final state, or -1 where the end is not known (the online rules). Above ``max_active`` the beam is at most
    ``search_beam`` and shrinks by a fifth; below ``min_active`` it is at least ``search_beam`` and grows by a quarter;
    between them it moves a fifth of the way to ``search_beam``. In the last four frames of an utterance it does not
    shrink, and ``min_active`` is at least half of ``max_active``, so that final states stay within reach.
    """
    ending = total >= 0 and step + 4 >= total
    fewest = max(rules.min_active, rules.max_active / 2) if ending else float(rules.min_active)
    if active > rules.max_active:
        if not ending:
            beam = min(beam, rules.search_beam) * 0.8
    elif active >= fewest or active == 0:
        beam = 0.8 * beam + 0.2 * rules.search_beam
    else:
        beam = max(beam, rules.search_beam) * 1.25
    return FINAL_BEAM if total >= 0 and step == total else beam


@compiled
def begin(arcs: Arcs, scratch: Scratch, records: Records, counters: Longs, beam: Doubles) -> int:
    """Put a token on the start state and on those that epsilon arcs lead to from there, within ``beam[0]``."""
    states, scores = scratch.next_states, scratch.next_scores
    states[0], scores[0] = 0, 0.0
    scratch.slot[0] = 0
    scratch.source[0], scratch.arc[0] = NO_ARC, NO_ARC
    active = 1
    if arcs.has_epsilons:
        active = close(arcs, scratch, states, scores, 1, -beam[0])
        if active < 0:
            return TOKENS_FULL
    if active > len(records.arc):
        return RECORDS_FULL
    for place in range(active):
        scratch.states[place], scratch.scores[place] = states[place], scores[place]
        records.previous[place] = ~scratch.source[place] if place else -1
        records.arc[place] = scratch.arc[place]
    counters[:] = 0
    counters[ACTIVE], counters[USED] = active, active
    counters[ROOT], counters[ROOT_STEP] = 0, 0
    return DONE


@compiled
def advance(
    arcs: Arcs,
    scratch: Scratch,
    records: Records,
    counters: Longs,
    beam: Doubles,
    log_probs: Floats,
    frames: Longs,
    first: int,
    total: int,
    rules: BeamRules,
    trace: Doubles,
) -> int:
    """Search the rows ``frames[first:]`` of ``log_probs`` ``(rows, labels)``, one step each.

    ``scratch.states`` and ``scratch.scores`` hold the ``counters[ACTIVE]`` tokens, before and after; ``beam`` ``(1,)``
    is the beam of the last step. ``total`` is as in :func:`~oasr_wfst.beam.next_beam`. ``trace`` ``(steps, 2)`` takes
    the beam and the active states of each step, unless it is empty. Where room is lacking nothing has happened in that
    step, and the search may go on from there.
    """
    states, scores = scratch.states, scratch.scores
    new_states, new_scores = scratch.next_states, scratch.next_scores
    swapped = False
    code = DONE
    for index in range(first, len(frames)):
        step, active = counters[STEP], counters[ACTIVE]
        dead = counters[DEAD] != 0
        width = next_beam(beam[0], 0 if dead else active, step, total, rules)
        new, best = 0, -np.inf
        if not dead:
            new, best = expand(
                arcs, scratch, states, scores, active, new_states, new_scores, log_probs[frames[index]], width
            )
        if new > 0:
            new = keep(arcs, scratch, new_states, new_scores, new, best - width)
            if arcs.has_epsilons:
                new = close(arcs, scratch, new_states, new_scores, new, best - width)
        if new < 0:
            code = TOKENS_FULL
            break
        if counters[USED] + new > len(records.arc):
            counters[NEEDED] = new
            code = RECORDS_FULL
            break
        beam[0] = width
        if len(trace):
            trace[index, 0], trace[index, 1] = width, 0 if dead else active
        counters[STEP] = step + 1
        if new == 0:
            counters[DEAD] = 1
            continue
        record(scratch, records, counters, new)
        states, new_states = new_states, states
        scores, new_scores = new_scores, scores
        swapped = not swapped
    if swapped:
        for place in range(counters[ACTIVE]):
            scratch.states[place] = states[place]
            scratch.scores[place] = scores[place]
    return code


@compiled
def expand(
    arcs: Arcs,
    scratch: Scratch,
    states: Ints,
    scores: Doubles,
    active: int,
    new_states: Ints,
    new_scores: Doubles,
    row: Floats,
    width: float,
) -> tuple[int, float]:
    """Follow the arcs that consume a frame: the new tokens (-1: no room) and the best score of any such arc.

    A new token may be worse than the best score less ``width``, because the best is known only in the end; it is so
    only where no arc into its state is better.
    """
    begin, dest, label, score, slot = arcs.begin, arcs.dest, arcs.label, arcs.score, scratch.slot
    source, via, room = scratch.source, scratch.arc, len(scratch.arc)
    leader = 0
    for place in range(active):
        if scores[place] > scores[leader]:
            leader = place
    best = -np.inf
    for leading in range(begin[states[leader]], begin[states[leader] + 1]):
        if label[leading] >= 0:
            best = max(best, scores[leader] + score[leading] + row[label[leading]])
    cutoff = best - width
    gain = arcs.gain + row.max() + _SLACK
    new = 0
    for place in range(active):
        # A state's arcs are anywhere in memory: ask for those of tokens to come. Unsigned indexes need no sign test.
        if place + 2 * _AHEAD < active:
            prefetch(begin, np.uint64(states[place + 2 * _AHEAD]))
        if place + _AHEAD < active:
            ahead = np.uint64(begin[states[place + _AHEAD]])
            prefetch(label, ahead)
            prefetch(dest, ahead)
            prefetch(score, ahead)
        before = scores[place]
        if before + gain <= cutoff:
            continue
        state = np.uint64(states[place])
        arc = np.uint64(begin[state])
        arc_end = np.uint64(begin[state + np.uint64(1)])
        while arc < arc_end:
            this = arc
            arc += np.uint64(1)
            column = label[this]
            if column < 0:
                continue
            after = before + score[this] + row[np.uint64(column)]
            if not after > cutoff:
                continue
            if after > best:
                best = after
                cutoff = best - width
            target = np.uint64(dest[this])
            there = slot[target]
            if there < new and new_states[np.uint64(there)] == dest[this]:
                if after > new_scores[np.uint64(there)]:
                    new_scores[np.uint64(there)] = after
                    source[np.uint64(there)], via[np.uint64(there)] = place, this
                continue
            if new == room:
                return -1, best
            slot[target] = new
            new_states[new], new_scores[new] = dest[this], after
            source[new], via[new] = place, this
            new += 1
    return new, best


@compiled
def keep(arcs: Arcs, scratch: Scratch, states: Ints, scores: Doubles, new: int, cutoff: float) -> int:
    """Drop new tokens that do not exceed ``cutoff``; returns how many are left."""
    kept = 0
    for place in range(new):
        if scores[place] > cutoff:
            if kept != place:
                states[kept], scores[kept] = states[place], scores[place]
                scratch.source[kept], scratch.arc[kept] = scratch.source[place], scratch.arc[place]
            scratch.slot[states[kept]] = kept
            kept += 1
    return kept


@compiled
def close(arcs: Arcs, scratch: Scratch, states: Ints, scores: Doubles, active: int, cutoff: float) -> int:
    """Follow epsilon arcs from the new tokens, as far as scores exceed ``cutoff``; -1 where there is no room.

    A token that becomes better after it was followed is followed again; no cycle gains, so that ends.
    """
    slot, queue, queued = scratch.slot, scratch.queue, scratch.queued
    room = len(queue)
    head, waiting = 0, 0
    for place in range(active):
        queued[place] = 0
        if arcs.epsilon_begin[states[place]] < arcs.epsilon_begin[states[place] + 1]:
            queue[waiting] = place
            queued[place] = 1
            waiting += 1
    # A ring: no token waits twice, so it holds all of them.
    while waiting > 0:
        place = queue[head]
        head = head + 1 if head + 1 < room else 0
        waiting -= 1
        queued[place] = 0
        state, before = states[place], scores[place]
        for index in range(arcs.epsilon_begin[state], arcs.epsilon_begin[state + 1]):
            arc = arcs.epsilon_arcs[index]
            after = before + arcs.score[arc]
            if not after > cutoff:
                continue
            target = arcs.dest[arc]
            there = slot[target]
            if there < active and states[there] == target:
                if not after > scores[there]:
                    continue
            else:
                if active == room:
                    return -1
                there = active
                slot[target] = there
                states[there] = target
                queued[there] = 0
                active += 1
            scores[there] = after
            scratch.source[there], scratch.arc[there] = ~place, arc
            if queued[there] == 0 and arcs.epsilon_begin[target] < arcs.epsilon_begin[target + 1]:
                tail = head + waiting
                queue[tail - room if tail >= room else tail] = there
                queued[there] = 1
                waiting += 1
    return active


@compiled
def record(scratch: Scratch, records: Records, counters: Longs, new: int) -> None:
    """Remember where the new tokens came from; they are the tokens from now on."""
    base, used = counters[BASE], counters[USED]
    for place in range(new):
        source = scratch.source[place]
        records.previous[used + place] = base + source if source >= 0 else used + ~source
        records.arc[used + place] = scratch.arc[place]
    counters[ACTIVE], counters[BASE], counters[USED] = new, used, used + new


@compiled
def end(arcs: Arcs, states: Ints, scores: Doubles) -> tuple[int, int, float, bool]:
    """The best step into the super-final state: place of the token, arc (-1: no path), score, whether it is final.

    ``states`` and ``scores`` ``(active,)`` are the tokens. Where no token has a final arc, the best arc that consumes
    a frame ends the path instead, without one (k2's ``allow_partial``).
    """
    place, arc, best = -1, NO_ARC, -np.inf
    final = False
    for token in range(len(states)):
        for leaving in range(arcs.begin[states[token]], arcs.begin[states[token] + 1]):
            if arcs.label[leaving] == FINAL and not final:
                final = True
                place, arc, best = -1, NO_ARC, -np.inf
            if (arcs.label[leaving] == FINAL) if final else (arcs.label[leaving] >= 0):
                score = scores[token] + arcs.score[leaving]
                if score > best:
                    place, arc, best = token, leaving, score
    return place, arc, best, final


@compiled
def ends(arcs: Arcs, states: Ints, final: bool) -> tuple[Longs, Ints, Doubles]:
    """All steps into the super-final state as :func:`end` takes them: token, arc, and score of the arc.

    Where no token has a final arc, each contributes its best arc.
    """
    places, leaving, scores = [0], [0], [0.0]
    for token in range(len(states)):
        best = -1
        for arc in range(arcs.begin[states[token]], arcs.begin[states[token] + 1]):
            if final and arcs.label[arc] == FINAL:
                places.append(token)
                leaving.append(arc)
                scores.append(float(arcs.score[arc]))
            elif not final and arcs.label[arc] >= 0 and (best < 0 or arcs.score[arc] > arcs.score[best]):
                best = arc
        if best >= 0:
            places.append(token)
            leaving.append(best)
            scores.append(float(arcs.score[best]))
    # The first entry tells the compiler the types.
    return np.array(places[1:]), np.array(leaving[1:]).astype(np.int32), np.array(scores[1:])
