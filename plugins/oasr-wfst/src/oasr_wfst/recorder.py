"""The lattice of one utterance while it is searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from oasr_wfst.lattice_search import LatticeArcs, LatticeNodes, add_emitting, add_epsilons, prune
from oasr_wfst.tokens import Arcs, Doubles, Floats, Ints, Longs

#: Frames between two prunings, and how many frames one goes back behind the one before.
_PRUNE_EVERY = 20
_PRUNE_OVERLAP = 10

_Scalar = TypeVar("_Scalar", np.int32, np.int64, np.float64)


class LatticeRecorder:
    """Collects the arcs between surviving tokens; in between, drops those that ``output_beam`` excludes.

    Its memory grows with the utterance, by what remains after pruning.
    """

    def __init__(self, arcs: Arcs, output_beam: float) -> None:
        self._arcs = arcs
        self._output_beam = output_beam
        self.nodes = LatticeNodes(np.empty(1024, np.int32), np.empty(1024, np.float64))
        self.arcs = LatticeArcs(
            np.empty(4096, np.int32), np.empty(4096, np.int32), np.empty(4096, np.int32), np.empty(4096, np.float64)
        )
        self.bounds: Longs = np.zeros((256, 3), np.int64)
        #: Steps so far; step 0 is the frame before the first.
        self.num_steps = 0
        self._pruned = 0

    def add(self, slot: Ints, states: Ints, scores: Doubles, row: Floats | None) -> None:
        """The tokens after a frame with the log posteriors ``row``; ``None``: before the first frame."""
        step = self.num_steps
        old = slice(self.bounds[step - 1, 0], self.bounds[step, 0]) if step else slice(0, 0)
        node = self._append_nodes(states, scores)
        used = int(self.bounds[step, 1])
        if row is not None:
            before = (self.nodes.state[old], self.nodes.score[old])
            used = self._collect(
                lambda: add_emitting(
                    self._arcs, slot, *before, states, scores, row, self._output_beam, old.start, node, self.arcs, used
                )
            )
        self.bounds[step, 2] = used
        if self._arcs.has_epsilons:
            used = self._collect(
                lambda: add_epsilons(self._arcs, slot, states, scores, self._output_beam, node, self.arcs, used)
            )
        self._end_step(used)
        if self.num_steps - self._pruned > _PRUNE_EVERY:
            self.prune(max(self._pruned - _PRUNE_OVERLAP, 0))
            self._pruned = self.num_steps

    def prune(self, first: int) -> None:
        """Drop what ``output_beam`` excludes behind step ``first``."""
        if self.num_steps - 1 > first:
            prune(self.nodes, self.arcs, self.bounds, first, self.num_steps - 1, self._output_beam)

    def copy(self) -> LatticeRecorder:
        """Another one with the same contents."""
        other = LatticeRecorder(self._arcs, self._output_beam)
        nodes, arcs = self.nodes, self.arcs
        other.nodes = LatticeNodes(nodes.state.copy(), nodes.score.copy())
        other.arcs = LatticeArcs(arcs.source.copy(), arcs.dest.copy(), arcs.arc.copy(), arcs.score.copy())
        other.bounds, other.num_steps, other._pruned = self.bounds.copy(), self.num_steps, self._pruned
        return other

    def end(self, state: int, score: float, sources: Longs, arcs: Ints, scores: Doubles) -> None:
        """The super-final ``state`` of best ``score``, entered from tokens ``sources`` of the last step by ``arcs``.

        Prunes all of the lattice; nothing may be added afterwards.
        """
        step = self.num_steps
        first = int(self.bounds[step - 1, 0])
        node = self._append_nodes(np.array([state], np.int32), np.array([score]))
        used = int(self.bounds[step, 1])
        self._grow_arcs(used + len(sources))
        room = slice(used, used + len(sources))
        self.arcs.source[room], self.arcs.dest[room] = first + sources, node
        self.arcs.arc[room], self.arcs.score[room] = arcs, scores
        self.bounds[step, 2] = room.stop
        self._end_step(room.stop)
        self.prune(0)

    def _append_nodes(self, states: Ints, scores: Doubles) -> int:
        step = self.num_steps
        if step + 2 > len(self.bounds):
            self.bounds = np.concatenate([self.bounds, np.zeros_like(self.bounds)])
        node = int(self.bounds[step, 0])
        needed = node + len(states)
        if needed > len(self.nodes.state):
            self.nodes = LatticeNodes(_grown(self.nodes.state, needed), _grown(self.nodes.score, needed))
        self.nodes.state[node:needed], self.nodes.score[node:needed] = states, scores
        self.bounds[step + 1, 0] = needed
        return node

    def _end_step(self, used: int) -> None:
        self.num_steps += 1
        self.bounds[self.num_steps, 1] = used

    def _collect(self, append: Callable[[], int]) -> int:
        """Append arcs, again with more room where it lacked."""
        used = append()
        if used > len(self.arcs.arc):
            self._grow_arcs(used)
            used = append()
        return used

    def _grow_arcs(self, needed: int) -> None:
        if needed > len(self.arcs.arc):
            source, dest, arc = (_grown(array, needed) for array in self.arcs[:3])
            self.arcs = LatticeArcs(source, dest, arc, _grown(self.arcs.score, needed))


def _grown(array: npt.NDArray[_Scalar], needed: int) -> npt.NDArray[_Scalar]:
    """A copy with room for ``needed`` elements and as many again."""
    new = np.empty(2 * needed, array.dtype)
    new[: len(array)] = array
    return new
