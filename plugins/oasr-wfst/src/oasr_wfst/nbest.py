"""The best word sequences of a lattice."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oasr_core.compiled import compiled
from oasr_wfst.lattice import Lattice
from oasr_wfst.tokens import Doubles, Ints, Longs


class WordSequence(NamedTuple):
    """``words`` and the score of the best path that has them; ``frames`` are those of the arcs with the words."""

    words: list[int]
    frames: list[int]
    score: float


def best_sequences(lattice: Lattice, count: int) -> list[WordSequence]:
    """The ``count`` best different word sequences, best first; fewer where the lattice has fewer. Exact."""
    if count < 1 or not lattice.num_arcs:
        return []
    scores, ends, parents, words, frames = _pass_lists(
        lattice.source, lattice.dest, lattice.score, lattice.word, lattice.frame, lattice.num_nodes, count
    )
    found = []
    for place in np.argsort(-scores, kind="stable"):
        if scores[place] == -np.inf:
            break
        chain = []
        at = int(ends[place])
        while at >= 0:
            chain.append(at)
            at = int(parents[at])
        chain.reverse()
        found.append(WordSequence(words[chain].tolist(), frames[chain].tolist(), float(scores[place])))
    return found


@compiled
def _pass_lists(
    source: Ints, dest: Ints, score: Doubles, word: Ints, frame: Longs, num_nodes: int, count: int
) -> tuple[Doubles, Ints, Ints, Ints, Longs]:
    """Each node's ``count`` best different histories, passed on along the arcs, which are sorted by ``source``.

    A history is known by a hash of its words. Returns scores ``(count,)`` and last words of the last node's, and for
    every word of any history the one before it (-1: none), the id, and the frame.
    """
    scores = np.full((num_nodes, count), -np.inf)
    hashes = np.zeros((num_nodes, count), np.uint64)
    ends = np.full((num_nodes, count), -1, np.int32)
    latest = np.zeros((num_nodes, count), np.int64)  # the last frame consumed, for words on epsilon arcs
    spoken = 0
    for arc in range(len(source)):
        spoken += word[arc] != 0
    parents = np.empty(spoken * count, np.int32)
    words = np.empty(spoken * count, np.int32)
    frames = np.empty(spoken * count, np.int64)
    used = 0
    scores[0, 0] = 0.0
    for arc in range(len(source)):
        node, target = source[arc], dest[arc]
        for place in range(count):
            if scores[node, place] == -np.inf:
                continue
            after = scores[node, place] + score[arc]
            code = hashes[node, place]
            if word[arc] != 0:
                code = (code ^ np.uint64(word[arc])) * np.uint64(0x9E3779B97F4A7C15)
                code ^= code >> np.uint64(29)
            chosen, worst = -1, 0
            for other in range(count):
                if scores[target, other] > -np.inf and hashes[target, other] == code:
                    chosen = other
                    break
                if scores[target, other] < scores[target, worst]:
                    worst = other
            if chosen < 0:
                chosen = worst
            if not after > scores[target, chosen]:
                continue
            scores[target, chosen], hashes[target, chosen] = after, code
            now = latest[node, place] if frame[arc] < 0 else frame[arc]
            latest[target, chosen] = now
            ends[target, chosen] = ends[node, place]
            if word[arc] != 0:
                parents[used], words[used], frames[used] = ends[node, place], word[arc], now
                ends[target, chosen] = used
                used += 1
    last = num_nodes - 1
    return scores[last], ends[last], parents, words, frames
