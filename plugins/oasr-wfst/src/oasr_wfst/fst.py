"""A transducer as OpenFst means it, in flat arrays, and the decoding graph that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, FINAL, Graph, sorted_graph
from oasr_wfst.symbols import SymbolTable

#: Symbols that tables have at id 0 for "no label".
EPSILON_SYMBOLS = ("<eps>", "<epsilon>", "-")

_State = TypeVar("_State", np.int32, np.int64)


@dataclass(frozen=True, eq=False)
class Fst:
    """Arcs with costs (smaller is better), label 0 is epsilon."""

    start: int
    #: float32 ``(num_states,)``: cost of ending in the state, ``inf`` where it is not final
    final: npt.NDArray[np.float32]
    #: int64 ``(num_arcs,)``, ascending or not
    source: npt.NDArray[np.int64]
    #: int32 ``(num_arcs,)``
    ilabel: npt.NDArray[np.int32]
    #: int32 ``(num_arcs,)``
    olabel: npt.NDArray[np.int32]
    #: float32 ``(num_arcs,)``
    cost: npt.NDArray[np.float32]
    #: int32 ``(num_arcs,)``
    dest: npt.NDArray[np.int32]
    input_symbols: SymbolTable = field(default_factory=lambda: SymbolTable.of(()))
    output_symbols: SymbolTable = field(default_factory=lambda: SymbolTable.of(()))

    @property
    def num_states(self) -> int:
        """States."""
        return len(self.final)

    @property
    def num_arcs(self) -> int:
        """Arcs; final costs are none."""
        return len(self.dest)

    def start_first(self) -> Fst:
        """The same transducer with its start at state 0 and its arcs sorted by source."""
        if self.start == 0 and not np.any(self.source[1:] < self.source[:-1]):
            return self
        final = self.final.copy()
        final[[0, self.start]] = self.final[[self.start, 0]]
        source = _start_first(self.source, self.start)
        order = np.argsort(source, kind="stable")
        return replace(
            self,
            start=0,
            final=final,
            source=source[order],
            ilabel=self.ilabel[order],
            olabel=self.olabel[order],
            cost=self.cost[order],
            dest=_start_first(self.dest, self.start)[order],
        )


def graph_from_fst(
    fst: Fst,
    *,
    symbols: Sequence[str] = (),
    tokens: Sequence[str] = (),
    label_offset: int = 1,
    note: str = "",
) -> Graph:
    """The decoding graph of ``fst``: column = input label - ``label_offset``, word id = output label.

    Input label 0 becomes an epsilon arc, final costs become arcs into a new last state, the start state becomes 0 (it
    changes places with what was 0). Arcs of infinite cost are left out. ``symbols`` and ``tokens`` (by column) go with
    the graph. Raises ``GraphError`` for labels below the offset and for what ``Graph.checked`` refuses.
    """
    below = np.flatnonzero((fst.ilabel != 0) & (fst.ilabel < label_offset))
    if len(below):
        arc = int(below[0])
        raise GraphError(
            f"arc {arc} has the input label {fst.ilabel[arc]}, with label_offset {label_offset} no column. "
            "0 is epsilon, and the label of the model's column 0 is the offset.",
            arc,
            "label",
        )
    usable = fst.cost != np.inf
    final_states = np.flatnonzero(fst.final != np.inf)
    last = fst.num_states
    impossible = np.flatnonzero(np.isnan(fst.cost) | (fst.cost == -np.inf))
    if len(impossible):
        arc = int(impossible[0])
        raise GraphError(f"arc {arc} has the cost {fst.cost[arc]}; costs are finite, or inf for no arc.", arc, "score")
    impossible = np.flatnonzero(np.isnan(fst.final) | (fst.final == -np.inf))
    if len(impossible):
        state = int(impossible[0])
        raise GraphError(f"state {state} has the final cost {fst.final[state]}; expected a number, or inf.", state)
    label = np.where(fst.ilabel == 0, EPSILON, fst.ilabel - label_offset)[usable].astype(np.int32)
    word = np.concatenate([fst.olabel[usable], np.zeros(len(final_states), dtype=np.int32)])
    return sorted_graph(
        _start_first(np.concatenate([fst.source[usable], final_states]), fst.start),
        np.concatenate([_start_first(fst.dest[usable], fst.start), np.full(len(final_states), last, dtype=np.int32)]),
        np.concatenate([label, np.full(len(final_states), FINAL, dtype=np.int32)]),
        # 0 - cost, so that a cost of 0 gives no negative zero.
        np.float32(0) - np.concatenate([fst.cost[usable], fst.final[final_states]]),
        (word != 0).astype(np.int64),
        word[word != 0],
        last + 1,
        symbols=symbols,
        tokens=tokens,
        note=note,
    )


def _start_first(states: npt.NDArray[_State], start: int) -> npt.NDArray[_State]:
    if start == 0:
        return states
    renumbered = states.copy()
    renumbered[states == 0] = start
    renumbered[states == start] = 0
    return renumbered
