"""Arcs of a lattice while it grows: collecting them after each frame, and pruning them backwards; compiled.

A node of the lattice is a token of one frame. ``bounds`` ``(steps + 1, 3)`` says where each step begins: among the
nodes, among the arcs that enter its nodes from the step before, and among the epsilon arcs between its own nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oasr_core.compiled import compiled
from oasr_wfst.tokens import Arcs, Bytes, Doubles, Floats, Ints, Longs


class LatticeNodes(NamedTuple):
    """``state`` and ``score``, the best score of a path to it, of each node."""

    state: Ints
    score: Doubles


class LatticeArcs(NamedTuple):
    """Nodes at both ends of each arc, the graph's arc (-1: none), and its score with the log posterior of its label."""

    source: Ints
    dest: Ints
    arc: Ints
    score: Doubles


@compiled
def add_emitting(
    arcs: Arcs,
    slot: Ints,
    states: Ints,
    scores: Doubles,
    new_states: Ints,
    new_scores: Doubles,
    row: Floats,
    output_beam: float,
    old_node: int,
    new_node: int,
    lattice: LatticeArcs,
    used: int,
) -> int:
    """Append the arcs from a frame's tokens to the next one's; returns arcs in use, which may exceed the room.

    ``old_node`` and ``new_node`` are the nodes of the first tokens. An arc that is worse than another way into its
    token by more than ``output_beam`` can be on no path that stays.
    """
    room = len(lattice.arc)
    for place in range(len(states)):
        for arc in range(arcs.begin[states[place]], arcs.begin[states[place] + 1]):
            if arcs.label[arc] < 0:
                continue
            there = slot[arcs.dest[arc]]
            if there >= len(new_states) or new_states[there] != arcs.dest[arc]:
                continue
            score = np.float64(arcs.score[arc]) + row[arcs.label[arc]]
            if scores[place] + score < new_scores[there] - output_beam:
                continue
            if used < room:
                lattice.source[used], lattice.dest[used] = old_node + place, new_node + there
                lattice.arc[used], lattice.score[used] = arc, score
            used += 1
    return used


@compiled
def add_epsilons(
    arcs: Arcs,
    slot: Ints,
    states: Ints,
    scores: Doubles,
    output_beam: float,
    node: int,
    lattice: LatticeArcs,
    used: int,
) -> int:
    """Append the epsilon arcs between the tokens of one frame, as :func:`add_emitting` does."""
    room = len(lattice.arc)
    for place in range(len(states)):
        for index in range(arcs.epsilon_begin[states[place]], arcs.epsilon_begin[states[place] + 1]):
            arc = arcs.epsilon_arcs[index]
            there = slot[arcs.dest[arc]]
            if there >= len(states) or states[there] != arcs.dest[arc]:
                continue
            if there == place or scores[place] + arcs.score[arc] < scores[there] - output_beam:
                continue
            if used < room:
                lattice.source[used], lattice.dest[used] = node + place, node + there
                lattice.arc[used], lattice.score[used] = arc, arcs.score[arc]
            used += 1
    return used


@compiled
def prune(nodes: LatticeNodes, lattice: LatticeArcs, bounds: Longs, first: int, last: int, output_beam: float) -> None:
    """Drop arcs and nodes behind step ``first`` that are on no path within ``output_beam`` of the best to its end.

    With ``first`` 0 those of step 0 too: nothing comes before it.

    Every node of step ``last``, the newest, counts as an end (k2's rule: nothing is dropped that the end of the
    utterance would have kept). ``bounds`` and all places are brought up to date.
    """
    lowest = first + 1 if first > 0 else 0
    begin = bounds[first, 0]
    size = bounds[last + 1, 0]
    behind = np.full(size - begin, -np.inf)  # best score from a node to the end, less that of the whole path
    for node in range(bounds[last, 0], size):
        behind[node - begin] = -nodes.score[node]
    origin = bounds[lowest, 1]
    kept = np.zeros(bounds[last + 1, 1] - origin, np.uint8)
    for step in range(last, lowest - 1, -1):
        changed = True
        while changed:
            changed = False
            for arc in range(bounds[step, 2], bounds[step + 1, 1]):
                if _keep(nodes, lattice, behind, begin, arc, output_beam):
                    kept[arc - origin] = 1
                    score = lattice.score[arc] + behind[lattice.dest[arc] - begin]
                    if score > behind[lattice.source[arc] - begin]:
                        behind[lattice.source[arc] - begin] = score
                        changed = True
        for arc in range(bounds[step, 1], bounds[step, 2]):
            if _keep(nodes, lattice, behind, begin, arc, output_beam):
                kept[arc - origin] = 1
                score = lattice.score[arc] + behind[lattice.dest[arc] - begin]
                behind[lattice.source[arc] - begin] = max(behind[lattice.source[arc] - begin], score)
    _compact(nodes, lattice, bounds, begin, lowest, last, behind, kept)


@compiled
def _keep(nodes: LatticeNodes, lattice: LatticeArcs, behind: Doubles, begin: int, arc: int, output_beam: float) -> bool:
    score = nodes.score[lattice.source[arc]] + lattice.score[arc] + behind[lattice.dest[arc] - begin]
    return bool(score >= -output_beam)


@compiled
def _compact(
    nodes: LatticeNodes,
    lattice: LatticeArcs,
    bounds: Longs,
    begin: int,
    lowest: int,
    last: int,
    behind: Doubles,
    kept: Bytes,
) -> None:
    place_of = np.empty(len(behind), np.int32)
    fresh = bounds[lowest, 0]
    for node in range(begin, fresh):
        place_of[node - begin] = node
    used, origin = bounds[lowest, 1], bounds[lowest, 1]
    for step in range(lowest, last + 1):
        node_begin, node_end = bounds[step, 0], bounds[step + 1, 0]
        arc_begin, epsilon_begin, arc_end = bounds[step, 1], bounds[step, 2], bounds[step + 1, 1]
        # The step's own bounds are rewritten before the next step's are read from the untouched part behind.
        bounds[step, 0] = fresh
        for node in range(node_begin, node_end):
            if behind[node - begin] > -np.inf:
                place_of[node - begin] = fresh
                nodes.state[fresh], nodes.score[fresh] = nodes.state[node], nodes.score[node]
                fresh += 1
        bounds[step, 1] = used
        bounds[step, 2] = used
        for arc in range(arc_begin, arc_end):
            if arc == epsilon_begin:
                bounds[step, 2] = used
            if kept[arc - origin]:
                lattice.source[used] = place_of[lattice.source[arc] - begin]
                lattice.dest[used] = place_of[lattice.dest[arc] - begin]
                lattice.arc[used], lattice.score[used] = lattice.arc[arc], lattice.score[arc]
                used += 1
        if epsilon_begin >= arc_end:
            bounds[step, 2] = used
    bounds[last + 1, 0] = fresh
    bounds[last + 1, 1] = used


@compiled
def order_epsilons(nodes: LatticeNodes, lattice: LatticeArcs, bounds: Longs, step: int) -> Ints:
    """Places of the nodes of one step such that epsilon arcs go from lower to higher ones; a cycle is cut.

    A cycle is entered at its best node, so that the arc that is cut is on no best path.
    """
    begin, size = bounds[step, 0], bounds[step + 1, 0] - bounds[step, 0]
    entering = np.zeros(size, np.int32)
    for arc in range(bounds[step, 2], bounds[step + 1, 1]):
        entering[lattice.dest[arc] - begin] += 1
    places = np.full(size, -1, np.int32)
    for place in range(size):
        chosen = -1
        for node in range(size):
            if places[node] >= 0:
                continue
            if entering[node] == 0:
                chosen = node
                break
            if chosen < 0 or nodes.score[begin + node] > nodes.score[begin + chosen]:
                chosen = node
        places[chosen] = place
        for arc in range(bounds[step, 2], bounds[step + 1, 1]):
            if lattice.source[arc] - begin == chosen:
                entering[lattice.dest[arc] - begin] -= 1
    return places
