"""The search of one frame on the GPU: the rules of :mod:`oasr_wfst.search`, many lanes at once.

A lane is one utterance or stream. Its tokens and records lie in arrays ``(lanes, room)``, those of a frame behind those
of the frame before; ``previous`` names places in the lane's own arrays. Arcs are numbered by *position*: those of the
lane's first token, then those of the second, so that programs share them evenly whatever the degrees of the states.

A frame is ``begin_frame``, then ``expand`` once for each phase, then ``end_frame``; nothing waits for the host. Where a
phase needs what all programs did before, the border between launches is the barrier. Tokens are numbered by the first
position that reaches their state, and of equal scores the first position wins: results do not depend on timing.

Scores are float64, as in the compiled search, so that both prune alike and streams may last. ``atomic_max`` orders them
as integers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, N803, N806
from __future__ import annotations

import triton
import triton.language as tl

#: Places in the counters of a lane, int32: active tokens; record of the first of them; records in use; frames searched;
#: whether no path was left; rows of the present piece that were searched and that there are; frames of the whole
#: utterance (-1: not known); positions of the present frame; whether room was lacking.
ACTIVE = tl.constexpr(0)
BASE = tl.constexpr(1)
USED = tl.constexpr(2)
STEP = tl.constexpr(3)
DEAD = tl.constexpr(4)
DONE = tl.constexpr(5)
ROWS = tl.constexpr(6)
TOTAL = tl.constexpr(7)
POSITIONS = tl.constexpr(8)
HALTED = tl.constexpr(9)
NUM_COUNTERS = tl.constexpr(10)

#: Phases of ``expand``: the best score of any arc; claims on states that have no token; how many claims won; tokens for
#: the winners; the best score into each; the first position that has it.
FIND_BEST = tl.constexpr(0)
CLAIM = tl.constexpr(1)
COUNT = tl.constexpr(2)
APPEND = tl.constexpr(3)
RAISE = tl.constexpr(4)
CHOOSE = tl.constexpr(5)
PHASES = (0, 1, 2, 3, 4, 5)

#: In ``slot``: no token. A token is ``-1 - place``; what is neither is the position of a claim.
NO_TOKEN = tl.constexpr(2147483647)
#: In ``chosen``: no arc.
NO_POSITION = tl.constexpr(2147483647)
#: The integer of the score -inf.
LOWEST = tl.constexpr(-9218868437227405313)

_MAGNITUDE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def ordered(score):
    """Integers in the order of float64 scores."""
    bits = score.to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def as_score(order):
    """The inverse of ``ordered``."""
    bits = tl.where(order < 0, order ^ _MAGNITUDE, order)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def widest_stride(count):
    """The largest power of two that is not above ``count``, at least 1."""
    stride = count * 0 + 1
    while stride <= count // 2:
        stride = stride * 2
    return stride


@triton.jit
def owner(offset, count, stride, position):
    """Which of ``count`` tokens, whose first positions are ``offset``, each position belongs to."""
    low = position * 0
    while stride > 0:
        ahead = low + stride
        begins = tl.load(offset + ahead, mask=ahead < count, other=NO_POSITION)
        low = tl.where(begins <= position, ahead, low)
        stride = stride // 2
    return low


@triton.jit
def emitting(position, valid, begin, states, offset, count, stride):
    """Token and arc of each position, of all arcs."""
    place = owner(offset, count, stride, position)
    state = tl.load(states + place, mask=valid, other=0)
    within = position - tl.load(offset + place, mask=valid, other=0)
    arc = tl.load(begin + state, mask=valid, other=0) + within
    return place, arc


@triton.jit
def silent(position, valid, epsilon_begin, epsilon_arcs, dest, score, states, scores, queue, offset, count, stride):
    """Token and arc of each position, of the epsilon arcs of the tokens in ``queue``; where it leads, and the score."""
    entry = owner(offset, count, stride, position)
    place = tl.load(queue + entry, mask=valid, other=0)
    state = tl.load(states + place, mask=valid, other=0)
    within = position - tl.load(offset + entry, mask=valid, other=0)
    index = tl.load(epsilon_begin + state, mask=valid, other=0) + within
    arc = tl.load(epsilon_arcs + index, mask=valid, other=0)
    to = tl.load(dest + arc, mask=valid, other=0)
    after = tl.load(scores + place, mask=valid, other=float("-inf")) + tl.load(score + arc, mask=valid, other=0.0)
    return place, arc, to, after


@triton.jit
def append(won, position, to, found, slot, states, scores, key, chosen, room):
    """A token for each claim that ``won``, from place ``found``; returns where the next one goes.

    Tokens beyond ``room`` are counted and not made.
    """
    place = found + tl.cumsum(won.to(tl.int32), 0) - 1
    fits = won & (place < room)
    tl.store(slot + to, -1 - place, mask=fits)
    tl.store(states + place, to, mask=fits)
    tl.store(scores + place, tl.full(place.shape, float("-inf"), tl.float64), mask=fits)
    tl.store(key + place, tl.full(place.shape, LOWEST, tl.int64), mask=fits)
    tl.store(chosen + place, tl.full(place.shape, NO_POSITION, tl.int32), mask=fits)
    return found + tl.sum(won.to(tl.int32), 0)


@triton.jit
def arrive(position, to, after, within, slot, scores, key, chosen, PHASE: tl.constexpr):
    """What the arcs at ``position``, which lead to states ``to`` with scores ``after``, do in the phases that race."""
    if PHASE == CLAIM:
        tl.atomic_min(slot + to, position, mask=within)
    else:
        place = -1 - tl.load(slot + to, mask=within, other=NO_TOKEN)
        within = within & (place >= 0)
        order = ordered(after)
        if PHASE == RAISE:
            tl.atomic_max(key + place, order, mask=within)
        else:
            within = within & (order == tl.load(key + place, mask=within, other=LOWEST))
            within = within & (after > tl.load(scores + place, mask=within, other=float("inf")))
            tl.atomic_min(chosen + place, position, mask=within)


@triton.jit(do_not_specialize=["room"])
def begin_frame(begin, states, offset, counters, beams, best, rules, room, BLOCK: tl.constexpr):
    """The beam of the frame, by the rules of ``next_beam``, and each token's first position; one program a lane."""
    lane = tl.program_id(0).to(tl.int64)
    numbers = counters + lane * NUM_COUNTERS
    searching = (tl.load(numbers + DONE) < tl.load(numbers + ROWS)) & (tl.load(numbers + HALTED) == 0)
    alive = searching & (tl.load(numbers + DEAD) == 0)
    active = tl.where(alive, tl.load(numbers + ACTIVE), 0)

    beam = tl.load(beams + lane * 2)
    search_beam, fewest, most = tl.load(rules), tl.load(rules + 1), tl.load(rules + 2)
    total = tl.load(numbers + TOTAL)
    ending = (total >= 0) & (tl.load(numbers + STEP) + 4 >= total)
    fewest = tl.where(ending, tl.maximum(fewest, most / 2), fewest)
    narrower = tl.where(ending, beam, tl.minimum(beam, search_beam) * 0.8)
    nearer = 0.8 * beam + 0.2 * search_beam
    wider = tl.maximum(beam, search_beam) * 1.25
    count = active.to(tl.float64)
    width = tl.where(count > most, narrower, tl.where((count >= fewest) | (count == 0), nearer, wider))
    tl.store(beams + lane * 2 + 1, width)
    tl.store(best + lane, tl.full([], LOWEST, tl.int64))

    tokens = lane * room + tl.load(numbers + BASE)
    positions = active * 0
    for start in range(0, active, BLOCK):
        place = start + tl.arange(0, BLOCK)
        state = tl.load(states + tokens + place, mask=place < active, other=0)
        degree = (tl.load(begin + state + 1) - tl.load(begin + state)).to(tl.int32)
        degree = tl.where(place < active, degree, 0)
        tl.store(offset + tokens + place, positions + tl.cumsum(degree, 0) - degree, mask=place < active)
        positions += tl.sum(degree, 0)
    tl.store(numbers + POSITIONS, positions)


@triton.jit(do_not_specialize=["room", "num_states", "columns", "piece"])
def expand(
    begin, dest, label, score, log_probs, first_value, frames,
    slot, states, scores, offset, key, chosen, counts, counters, beams, best,
    room, num_states, columns, piece,
    PHASE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One phase of following the arcs that consume a frame; ``PROGRAMS`` programs a lane share its positions."""
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    numbers = counters + lane * NUM_COUNTERS
    positions, active = tl.load(numbers + POSITIONS), tl.load(numbers + ACTIVE)
    used = tl.load(numbers + USED)
    tokens, new = lane * room + tl.load(numbers + BASE), lane * room + used
    frame = tl.load(frames + lane * piece + tl.load(numbers + DONE), mask=positions > 0, other=0)
    row = log_probs + tl.load(first_value + lane) + frame * columns
    slot += lane * num_states
    cutoff = as_score(tl.load(best + lane)) - tl.load(beams + lane * 2 + 1)
    stride = widest_stride(active)

    found = program * 0
    top = tl.full([], float("-inf"), tl.float64)
    if PHASE == APPEND:
        before = tl.arange(0, PROGRAMS)
        found += tl.sum(tl.load(counts + lane * PROGRAMS + before, mask=before < program, other=0), 0)
    share = tl.cdiv(tl.cdiv(positions, BLOCK), PROGRAMS) * BLOCK
    for start in range(program * share, tl.minimum((program + 1) * share, positions), BLOCK):
        position = start + tl.arange(0, BLOCK)
        valid = position < positions
        place, arc = emitting(position, valid, begin, states + tokens, offset + tokens, active, stride)
        to = tl.load(dest + arc, mask=valid, other=0)
        if PHASE == COUNT or PHASE == APPEND:  # noqa: SIM109 - not in this language
            won = valid & (tl.load(slot + to, mask=valid, other=NO_TOKEN) == position)
            if PHASE == COUNT:
                found += tl.sum(won.to(tl.int32), 0)
            else:
                found = append(
                    won, position, to, found, slot, states + new, scores + new, key + new, chosen + new, room - used
                )
        else:
            column = tl.load(label + arc, mask=valid, other=-1)
            after = tl.load(scores + tokens + place, mask=valid, other=float("-inf"))
            after += tl.load(score + arc, mask=valid, other=0.0)
            after += tl.load(row + column, mask=column >= 0, other=float("-inf"))
            if PHASE == FIND_BEST:
                top = tl.maximum(top, tl.max(after, 0))
            else:
                arrive(position, to, after, after > cutoff, slot, scores + new, key + new, chosen + new, PHASE)
    if PHASE == FIND_BEST:
        tl.atomic_max(best + lane, ordered(top))
    if PHASE == COUNT:
        tl.store(counts + lane * PROGRAMS + program, found)


@triton.jit
def follow(
    epsilon_begin, epsilon_arcs, dest, score, slot, states, scores, offset, key, chosen, queue,
    waiting, positions, active, room, cutoff, PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One phase of following the epsilon arcs of the ``waiting`` tokens in ``queue``; returns the count of tokens."""
    stride = widest_stride(waiting)
    for start in range(0, positions, BLOCK):
        position = start + tl.arange(0, BLOCK)
        valid = position < positions
        _, _, to, after = silent(
            position, valid, epsilon_begin, epsilon_arcs, dest, score, states, scores, queue, offset, waiting, stride
        )
        if PHASE == APPEND:
            won = valid & (tl.load(slot + to, mask=valid, other=NO_TOKEN) == position)
            active = append(won, position, to, active, slot, states, scores, key, chosen, room)
        else:
            arrive(position, to, after, valid & (after > cutoff), slot, scores, key, chosen, PHASE)
    tl.debug_barrier()
    return active


@triton.jit
def number_silent(epsilon_begin, states, offset, queue, waiting, BLOCK: tl.constexpr):
    """The first position of each token in ``queue`` among their epsilon arcs; returns how many there are."""
    positions = waiting * 0
    for start in range(0, waiting, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        waits = entry < waiting
        state = tl.load(states + tl.load(queue + entry, mask=waits, other=0), mask=waits, other=0)
        degree = tl.where(waits, tl.load(epsilon_begin + state + 1) - tl.load(epsilon_begin + state), 0)
        tl.store(offset + entry, positions + tl.cumsum(degree, 0) - degree, mask=waits)
        positions += tl.sum(degree, 0)
    tl.debug_barrier()
    return positions


@triton.jit
def improve(
    epsilon_begin, epsilon_arcs, dest, score, states, scores, previous, arcs, offset, key, chosen, queue,
    waiting, active, used, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores and records of the tokens for which an arc was chosen, which are then in ``queue``; returns how many."""
    stride = widest_stride(waiting)
    for start in range(0, active, BLOCK):
        place = start + tl.arange(0, BLOCK)
        position = tl.load(chosen + place, mask=place < active, other=NO_POSITION)
        better = position != NO_POSITION
        position = tl.where(better, position, 0)
        source, arc, _, _ = silent(
            position, better, epsilon_begin, epsilon_arcs, dest, score, states, scores, queue, offset, waiting, stride
        )
        tl.store(previous + place, used + source, mask=better)
        tl.store(arcs + place, arc, mask=better)
        tl.store(scores + place, as_score(tl.load(key + place, mask=better, other=0)), mask=better)
    tl.debug_barrier()
    improved = waiting * 0
    for start in range(0, active, BLOCK):
        place = start + tl.arange(0, BLOCK)
        better = tl.load(chosen + place, mask=place < active, other=NO_POSITION) != NO_POSITION
        entry = improved + tl.cumsum(better.to(tl.int32), 0) - 1
        tl.store(queue + entry, place, mask=better)
        tl.store(chosen + place, tl.full(place.shape, NO_POSITION, tl.int32), mask=better)
        improved += tl.sum(better.to(tl.int32), 0)
    tl.debug_barrier()
    return improved


@triton.jit
def close(
    epsilon_begin, epsilon_arcs, dest, score, slot, states, scores, previous, arcs, offset, key, chosen, queue,
    active, used, room, cutoff, BLOCK: tl.constexpr,
):  # fmt: skip
    """Follow epsilon arcs from the ``active`` new tokens until none becomes better; returns how many there are then.

    In rounds: only tokens that the last round made better are followed, from their scores at its end, and only what is
    strictly better becomes a token's arc, so that no path runs in a circle. One program, whose threads meet at
    barriers. ``room`` is that behind record ``used``.
    """
    waiting = active
    for start in range(0, active, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(queue + place, place, mask=place < active)
    tl.debug_barrier()
    while (waiting > 0) & (active <= room):
        positions = number_silent(epsilon_begin, states, offset, queue, waiting, BLOCK)
        for PHASE in tl.static_range(CLAIM, CHOOSE + 1):
            if PHASE != COUNT:
                active = follow(
                    epsilon_begin, epsilon_arcs, dest, score, slot, states, scores, offset, key, chosen, queue,
                    waiting, positions, active, room, cutoff, PHASE, BLOCK,
                )  # fmt: skip
        waiting = improve(
            epsilon_begin, epsilon_arcs, dest, score, states, scores, previous, arcs, offset, key, chosen, queue,
            waiting, tl.minimum(active, room), used, BLOCK,
        )  # fmt: skip
    return active


@triton.jit(do_not_specialize=["room", "num_states", "piece"])
def end_frame(
    begin, dest, score, epsilon_begin, epsilon_arcs,
    slot, states, scores, previous, arcs, offset, key, chosen, queue, counts, counters, beams, best, trace,
    room, num_states, piece,
    HAS_EPSILONS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Records of the new tokens, and those that epsilon arcs lead to; one program a lane.

    ``trace`` ``(lanes, piece, 3)`` takes the beam of the frame, the tokens before it and after it. Where room is
    lacking nothing has happened but ``HALTED``, and ``slot`` has to be cleared.
    """
    lane = tl.program_id(0).to(tl.int64)
    numbers = counters + lane * NUM_COUNTERS
    done = tl.load(numbers + DONE)
    if (done < tl.load(numbers + ROWS)) & (tl.load(numbers + HALTED) == 0):
        dead = tl.load(numbers + DEAD)
        active, base, used = tl.load(numbers + ACTIVE), tl.load(numbers + BASE), tl.load(numbers + USED)
        tokens, new = lane * room + base, lane * room + used
        width = tl.load(beams + lane * 2 + 1)
        slot += lane * num_states
        count = tl.sum(tl.load(counts + lane * PROGRAMS + tl.arange(0, PROGRAMS)), 0)
        if count <= room - used:
            stride = widest_stride(active)
            for start in range(0, count, BLOCK):
                place = start + tl.arange(0, BLOCK)
                valid = place < count
                position = tl.load(chosen + new + place, mask=valid, other=0)
                source, arc = emitting(position, valid, begin, states + tokens, offset + tokens, active, stride)
                tl.store(previous + new + place, base + source, mask=valid)
                tl.store(arcs + new + place, arc.to(tl.int32), mask=valid)
                tl.store(scores + new + place, as_score(tl.load(key + new + place, mask=valid, other=0)), mask=valid)
                tl.store(chosen + new + place, tl.full(place.shape, NO_POSITION, tl.int32), mask=valid)
            if HAS_EPSILONS:
                tl.debug_barrier()
                cutoff = as_score(tl.load(best + lane)) - width
                count = close(
                    epsilon_begin, epsilon_arcs, dest, score, slot, states + new, scores + new, previous + new,
                    arcs + new, offset + new, key + new, chosen + new, queue + new,
                    count, used, room - used, cutoff, BLOCK,
                )  # fmt: skip
        if count > room - used:
            tl.store(numbers + HALTED, 1)
        else:
            for start in range(0, count, BLOCK):
                place = start + tl.arange(0, BLOCK)
                valid = place < count
                state = tl.load(states + new + place, mask=valid, other=0)
                tl.store(slot + state, tl.full(place.shape, NO_TOKEN, tl.int32), mask=valid)
            record = trace + (lane * piece + done) * 3
            tl.store(record, width)
            tl.store(record + 1, tl.where(dead != 0, 0, active).to(tl.float64))
            tl.store(record + 2, count.to(tl.float64))
            tl.store(beams + lane * 2, width)
            tl.store(numbers + STEP, tl.load(numbers + STEP) + 1)
            tl.store(numbers + DONE, done + 1)
            if count == 0:
                tl.store(numbers + DEAD, 1)
            else:
                tl.store(numbers + ACTIVE, count)
                tl.store(numbers + BASE, used)
                tl.store(numbers + USED, used + count)
