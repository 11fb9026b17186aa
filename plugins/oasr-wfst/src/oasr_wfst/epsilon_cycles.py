"""Finds cycles of epsilon arcs along which a path could gain without end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def find_gaining_cycle(
    source: npt.NDArray[np.int64], dest: npt.NDArray[np.int32], score: npt.NDArray[np.float32]
) -> int | None:
    """Index of an epsilon arc of positive score that lies on a cycle, ``None`` where there is none.

    Three arrays of the size ``(num_epsilon_arcs,)``, ``source`` ascending. A cycle is judged by its arcs and not by
    its sum, because a sum of rounded scores that should be zero may come out above it.
    """
    suspects = np.flatnonzero(score > 0)
    if not len(suspects):
        return None
    cyclic = _arcs_on_or_after_cycles(source, dest)
    for arc in suspects[cyclic[suspects]]:
        if _reaches(int(dest[arc]), int(source[arc]), source, dest):
            return int(arc)
    return None


def _arcs_on_or_after_cycles(source: npt.NDArray[np.int64], dest: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which arcs remain when states that no remaining arc enters are taken away, again and again."""
    size = int(max(source.max(), dest.max())) + 1
    entering = np.bincount(dest, minlength=size)
    begin = np.searchsorted(source, np.arange(size + 1))
    remaining = np.ones(len(source), dtype=np.bool_)
    frontier = np.flatnonzero(entering == 0)
    while len(frontier):
        counts = begin[frontier + 1] - begin[frontier]
        firsts = np.cumsum(counts) - counts
        arcs = np.repeat(begin[frontier] - firsts, counts) + np.arange(counts.sum())
        remaining[arcs] = False
        np.subtract.at(entering, dest[arcs], 1)
        touched = np.unique(dest[arcs])
        frontier = touched[entering[touched] == 0]
    return remaining


def _reaches(start: int, goal: int, source: npt.NDArray[np.int64], dest: npt.NDArray[np.int32]) -> bool:
    seen = {start}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state == goal:
            return True
        first, last = np.searchsorted(source, (state, state + 1))
        for following in dest[first:last].tolist():
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return False
