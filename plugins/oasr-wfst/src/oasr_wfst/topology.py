"""The CTC topology, composed with a transducer of tokens and words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oasr_wfst.fst import Fst
from oasr_wfst.graph import EPSILON, FINAL, Graph, sorted_graph


def compose_ctc(fst: Fst, *, symbols: Sequence[str] = (), tokens: Sequence[str] = (), note: str = "") -> Graph:
    """The graph of CTC paths through ``fst``, whose input label ``n`` is the token of column ``n - 1`` (0: epsilon).

    The standard topology: a token repeats on a self-loop, blanks may stand before, between and behind tokens, and must
    stand between two equal ones; score and words of an arc of ``fst`` go with the first frame of its token. The product
    is made directly and not by composing transducers, since the topology of V tokens has V * V arcs. ``fst`` must start
    at state 0 and have its arcs sorted by source.
    """
    arcs = _Arcs(fst)
    # A state of the product is a state of ``fst`` and the column that was read last, 0 for blank.
    states = _product_states(arcs, fst.num_states)
    at, column = np.divmod(states, arcs.width)
    counts = arcs.begin[at + 1] - arcs.begin[at]
    owner = np.repeat(np.arange(len(states)), counts)
    arc = np.repeat(arcs.begin[at] - (np.cumsum(counts) - counts), counts) + np.arange(len(owner))
    allowed = arcs.label[arc] != column[owner]
    owner, arc = owner[allowed], arc[allowed]
    label = arcs.label[arc]
    entered = np.where(label == EPSILON, column[owner], label)
    dest = np.searchsorted(states, arcs.dest[arc].astype(np.int64) * arcs.width + entered)
    holding = np.flatnonzero(column)
    ending = np.flatnonzero(fst.final[at] != np.inf)
    everyone = np.arange(len(states))
    blank_dest = np.searchsorted(states, at * arcs.width)
    word = fst.olabel[arc]
    silent = len(states) + len(holding)
    # Of each state: blank, the token again, the arcs, the end.
    return sorted_graph(
        np.concatenate([everyone, holding, owner, ending]),
        np.concatenate([blank_dest, holding, dest, np.full(len(ending), len(states))]).astype(np.int32),
        np.concatenate([np.zeros(len(states)), column[holding], label, np.full(len(ending), FINAL)]).astype(np.int32),
        np.float32(0) - np.concatenate([np.zeros(silent), fst.cost[arc], fst.final[at[ending]]]).astype(np.float32),
        np.concatenate([np.zeros(silent), word != 0, np.zeros(len(ending))]).astype(np.int64),
        word[word != 0],
        len(states) + 1,
        symbols=symbols,
        tokens=tokens,
        note=note,
    )


class _Arcs:
    """The arcs of a transducer by state, with columns for labels."""

    def __init__(self, fst: Fst) -> None:
        self.begin = np.concatenate([[0], np.cumsum(np.bincount(fst.source, minlength=fst.num_states))])
        self.source, self.dest = fst.source, fst.dest
        self.label = np.where(fst.ilabel == 0, EPSILON, fst.ilabel - 1)
        self.width = int(self.label.max(initial=0)) + 1


def _product_states(arcs: _Arcs, num_states: int) -> npt.NDArray[np.int64]:
    """Keys ``state * width + column`` of the states that can be reached, ascending.

    Every state can be reached with a blank read last, and with each token that enters it; through an epsilon arc the
    column that was read last stays what it was.
    """
    reading = arcs.label != EPSILON
    entered = arcs.dest[reading].astype(np.int64) * arcs.width + arcs.label[reading]
    states = np.union1d(np.arange(num_states, dtype=np.int64) * arcs.width, entered)
    silent = np.flatnonzero(~reading)
    begin = np.searchsorted(arcs.source[silent], np.arange(num_states + 1))
    fresh = states
    while len(fresh):
        at, column = np.divmod(fresh, arcs.width)
        counts = begin[at + 1] - begin[at]
        owner = np.repeat(np.arange(len(fresh)), counts)
        arc = silent[np.repeat(begin[at] - (np.cumsum(counts) - counts), counts) + np.arange(len(owner))]
        passed = np.unique(arcs.dest[arc].astype(np.int64) * arcs.width + column[owner])
        fresh = np.setdiff1d(passed, states, assume_unique=True)
        states = np.union1d(states, fresh)
    return states
