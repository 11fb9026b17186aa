"""Reading and tidying the records of a lane, compiled: words so far, and what all paths have in common."""

from __future__ import annotations

import numpy as np

from oasr_core.compiled import compiled
from oasr_wfst.tokens import ACTIVE, BASE, NO_ARC, ROOT, ROOT_STEP, USED, Arcs, Ints, Longs, Records


@compiled
def path_to(arcs: Arcs, records: Records, node: int, root_step: int) -> tuple[Ints, Longs]:
    """The arcs from the root to the record ``node`` and the number of frames consumed when each has been taken."""
    count = 0
    at = node
    while records.previous[at] >= 0:
        count += 1
        at = records.previous[at]
    path, steps = np.empty(count, np.int32), np.empty(count, np.int64)
    at = node
    for place in range(count - 1, -1, -1):
        path[place] = records.arc[at]
        at = records.previous[at]
    step = root_step
    for place in range(count):
        if arcs.label[path[place]] >= 0:
            step += 1
        steps[place] = step
    return path, steps


@compiled
def collect(arcs: Arcs, records: Records, counters: Longs) -> tuple[Ints, Longs]:
    """Drop the records of lost paths, and those that all paths share: their arcs and frames, as from :func:`path_to`.

    The last shared record becomes the root; records in use and their places change, never those of the tokens among
    one another.
    """
    base, used = counters[BASE], counters[USED]
    place_of = np.full(used, -1, np.int32)  # -1: lost; later the new place
    children = np.zeros(used, np.int32)
    heir = np.empty(used, np.int32)
    for token in range(base, base + counters[ACTIVE]):
        node = token
        while node >= 0 and place_of[node] < 0:
            place_of[node] = 0
            previous = records.previous[node]
            if previous >= 0:
                children[previous] += 1
                heir[previous] = node
            node = previous
    root, count = counters[ROOT], 0
    while root < base and children[root] == 1:
        place_of[root] = -1
        root = heir[root]
        count += 1
    shared, steps = np.empty(count, np.int32), np.empty(count, np.int64)
    step = counters[ROOT_STEP]
    node = counters[ROOT]
    for place in range(count):
        node = heir[node]
        shared[place] = records.arc[node]
        if arcs.label[shared[place]] >= 0:
            step += 1
        steps[place] = step
    records.previous[root] = -1
    if count:
        records.arc[root] = NO_ARC
    kept = 0
    for node in range(used):
        if place_of[node] >= 0:
            place_of[node] = kept
            kept += 1
    for node in range(used):
        place = place_of[node]
        if place >= 0:
            previous = records.previous[node]
            records.previous[place] = place_of[previous] if previous >= 0 else -1
            records.arc[place] = records.arc[node]
    counters[ROOT], counters[ROOT_STEP] = place_of[root], step
    counters[BASE], counters[USED] = place_of[base], kept
    return shared, steps


@compiled
def words_of(
    arcs: Arcs, path: Ints, steps: Longs, word_begin: Longs, words: Ints, blank: int
) -> tuple[Ints, Longs, Longs, int]:
    """The words on the arcs of ``path``: ids, the entry of ``steps`` of the arc, and the one where the word ends.

    A word ends with the last label that is not ``blank`` before the next word. The last result is where the word before
    ``path`` ends, -1 where that is not in ``path``.
    """
    count = 0
    for arc in path:
        count += word_begin[arc + 1] - word_begin[arc]
    spoken = np.empty(count, np.int32)
    starts, ends = np.empty(count, np.int64), np.empty(count, np.int64)
    place, before = 0, -1
    for index in range(len(path)):
        arc = path[index]
        for word in range(word_begin[arc], word_begin[arc + 1]):
            spoken[place], starts[place], ends[place] = words[word], steps[index], steps[index]
            place += 1
        if arcs.label[arc] >= 0 and arcs.label[arc] != blank:
            if place:
                ends[place - 1] = steps[index]
            else:
                before = steps[index]
    return spoken, starts, ends, before


@compiled
def last_speech(arcs: Arcs, path: Ints, steps: Longs, blank: int) -> int:
    """Frames consumed when the last arc of ``path`` with a label that is not ``blank`` has been taken; -1: none."""
    for index in range(len(path) - 1, -1, -1):
        if arcs.label[path[index]] >= 0 and arcs.label[path[index]] != blank:
            return int(steps[index])
    return -1
