"""Arrays of the search: the graph as kernels see it, the tokens of a frame, and the records that remember their paths.

A token is the best path into one state after one frame. Its record names the record of the token that it came from and
the arc in between; the records of a frame lie behind one another, in the order of the tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from oasr_wfst.graph import EPSILON, Graph

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: Places in the counters of a lane: active tokens; record of the first of them; records in use; frames searched;
#: whether no path was left (its tokens are those of the last frame that had some); root record; frames before it;
#: records that the frame needs for which there was no room.
ACTIVE: Final = 0
BASE: Final = 1
USED: Final = 2
STEP: Final = 3
DEAD: Final = 4
ROOT: Final = 5
ROOT_STEP: Final = 6
NEEDED: Final = 7
NUM_COUNTERS: Final = 8

#: Arc of a record that no arc leads to.
NO_ARC: Final = -1

_SMALLEST_TOKENS = 4096
_SMALLEST_RECORDS = 65536


class Arcs(NamedTuple):
    """The graph's arrays that the inner loop reads; see :class:`~oasr_wfst.graph.Graph` for their shapes.

    ``epsilon_arcs`` are the epsilon arcs of all states in order, those of state ``s`` between ``epsilon_begin[s]`` and
    ``epsilon_begin[s + 1]``; both are empty without epsilons. ``gain`` is the largest score of any arc.
    """

    begin: Longs
    dest: Ints
    label: Ints
    score: Floats
    epsilon_begin: Ints
    epsilon_arcs: Ints
    has_epsilons: bool
    gain: float

    @classmethod
    def of(cls, graph: Graph) -> Arcs:
        """Those of ``graph``, not copied, and an index of its epsilon arcs."""
        begin, arcs = np.empty(0, np.int32), np.empty(0, np.int32)
        if graph.has_epsilons:
            begin = np.zeros(graph.num_states + 1, np.int32)
            np.cumsum(graph.epsilon_count, out=begin[1:])
            arcs = np.flatnonzero(graph.label == EPSILON).astype(np.int32)
        gain = float(np.max(graph.score))
        columns = (graph.arc_begin, graph.dest, graph.label, graph.score)
        return cls(*columns, begin, arcs, graph.has_epsilons, gain)


class Scratch(NamedTuple):
    """What one thread searches with, whatever it searches.

    ``slot`` ``(num_states,)``: the place of a state among the new tokens; meaningless unless that token is of that
    state, hence never cleared. ``states`` and ``scores`` are the tokens, ``next_*`` the new ones; ``source`` is the
    place of the token that a new one came from (``~place`` among the new ones, over an epsilon arc), ``arc`` the arc.
    ``queue`` and ``queued`` are the tokens whose epsilon arcs have to be followed.
    """

    slot: Ints
    states: Ints
    scores: Doubles
    next_states: Ints
    next_scores: Doubles
    source: Ints
    arc: Ints
    queue: Ints
    queued: Bytes

    @classmethod
    def of(cls, num_states: int, tokens: int = _SMALLEST_TOKENS) -> Scratch:
        """Room for ``tokens`` tokens; a graph of ``num_states`` states never has more than that many."""
        return cls(np.zeros(num_states, np.int32), *_token_arrays(min(max(tokens, 1), num_states)))

    def grown(self) -> Scratch:
        """Room for twice as many tokens, with the present ones in place."""
        new = Scratch(self.slot, *_token_arrays(min(2 * len(self.states), len(self.slot))))
        new.states[: len(self.states)] = self.states
        new.scores[: len(self.scores)] = self.scores
        return new


class Records(NamedTuple):
    """Where each token came from: ``previous`` ``(records,)`` record (-1: none) and ``arc`` ``(records,)``."""

    previous: Ints
    arc: Ints

    @classmethod
    def of(cls, size: int = _SMALLEST_RECORDS) -> Records:
        """Room for ``size`` of them."""
        return cls(np.empty(size, np.int32), np.empty(size, np.int32))


def _token_arrays(size: int) -> tuple[Ints, Doubles, Ints, Doubles, Ints, Ints, Ints, Bytes]:
    return (
        np.empty(size, np.int32),
        np.empty(size, np.float64),
        np.empty(size, np.int32),
        np.empty(size, np.float64),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.zeros(size, np.uint8),
    )
