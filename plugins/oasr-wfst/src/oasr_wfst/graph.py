"""The decoding graph in memory: arcs sorted by their source state, in flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from oasr_wfst.epsilon_cycles import find_gaining_cycle
from oasr_wfst.errors import GraphError
from oasr_wfst.symbols import SymbolTable

#: Label of an arc that consumes no frame.
EPSILON: Final = -2
#: Label of an arc into the super-final state; it consumes no frame (k2's convention).
FINAL: Final = -1

#: An arc for :func:`graph_from_arcs`: source, destination, label, score, word ids.
Arc = tuple[int, int, int, float, Sequence[int]]

_Scalar = TypeVar("_Scalar", np.int32, np.int64, np.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A decoding graph whose labels are columns of a model's CTC log-probabilities.

    State 0 is the start and state ``num_states - 1`` is the super-final state, which no arc leaves. All arrays are
    read-only, contiguous, and may be mapped from a file. Make graphs with :meth:`checked`, never by hand: decoders
    index with these arrays without looking.
    """

    #: int64 ``(num_states + 1,)``: the arcs of state ``s`` are ``arc_begin[s]:arc_begin[s + 1]``, in the source's order
    arc_begin: npt.NDArray[np.int64]
    #: int32 ``(num_arcs,)``: destination state
    dest: npt.NDArray[np.int32]
    #: int32 ``(num_arcs,)``: column of the log-probabilities (0 is blank), :data:`FINAL` or :data:`EPSILON`
    label: npt.NDArray[np.int32]
    #: float32 ``(num_arcs,)``: natural logarithm, larger is better
    score: npt.NDArray[np.float32]
    #: int64 ``(num_arcs + 1,)``: the words of arc ``a`` are ``words[word_begin[a]:word_begin[a + 1]]``
    word_begin: npt.NDArray[np.int64]
    #: int32: word ids of all arcs in order, each at least 1
    words: npt.NDArray[np.int32]
    #: int32 ``(num_states,)``: arcs labelled :data:`EPSILON` that leave each state
    epsilon_count: npt.NDArray[np.int32]
    #: largest label
    max_label: int
    #: whether any arc is labelled :data:`EPSILON`
    has_epsilons: bool
    #: word id -> text; empty where the source had none
    symbols: SymbolTable = field(default_factory=lambda: SymbolTable.of(()))
    #: label -> text; empty where the source had none
    tokens: SymbolTable = field(default_factory=lambda: SymbolTable.of(()))
    #: where the graph comes from, for people
    note: str = ""

    def __repr__(self) -> str:
        return f"Graph({self.num_states} states, {self.num_arcs} arcs, {self.num_columns} columns, {self.note!r})"

    @property
    def num_states(self) -> int:
        """States, with the super-final one."""
        return len(self.arc_begin) - 1

    @property
    def num_arcs(self) -> int:
        """Arcs, with those into the super-final state."""
        return len(self.dest)

    @property
    def num_columns(self) -> int:
        """Columns of log-probabilities that the labels need: largest label + 1."""
        return self.max_label + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, without symbols."""
        arrays = (self.arc_begin, self.dest, self.label, self.score, self.word_begin, self.words, self.epsilon_count)
        return sum(array.nbytes for array in arrays)

    @classmethod
    def checked(
        cls,
        arc_begin: npt.NDArray[np.int64],
        dest: npt.NDArray[np.int32],
        label: npt.NDArray[np.int32],
        score: npt.NDArray[np.float32],
        word_begin: npt.NDArray[np.int64],
        words: npt.NDArray[np.int32],
        *,
        symbols: Sequence[str] = (),
        tokens: Sequence[str] = (),
        note: str = "",
    ) -> Graph:
        """The graph of these arrays, every one of them checked.

        Raises ``GraphError`` naming array and index where: a size does not fit, offsets decrease or leave the array, a
        destination is no state, a label is below :data:`EPSILON`, a score is not finite, a word id is below 1 or
        outside of ``symbols``, an arc leaves the super-final state, an arc is labelled :data:`FINAL` without leading
        there or leads there without the label, or a cycle of epsilon arcs has an arc of positive score (going round
        would gain without end; epsilon cycles whose scores are all zero or negative are accepted, they gain nothing).
        """
        word_table = symbols if isinstance(symbols, SymbolTable) else SymbolTable.of(symbols)
        token_table = tokens if isinstance(tokens, SymbolTable) else SymbolTable.of(tokens)
        arc_begin, word_begin = _flat(arc_begin, np.int64), _flat(word_begin, np.int64)
        dest, label, words = _flat(dest, np.int32), _flat(label, np.int32), _flat(words, np.int32)
        score = _flat(score, np.float32)
        _check_sizes(arc_begin, dest, label, score, word_begin, words)
        _check_ranges(arc_begin, dest, label, score, words, len(word_table))
        epsilon_arcs = np.flatnonzero(label == EPSILON)
        sources = np.searchsorted(arc_begin, epsilon_arcs, side="right") - 1
        gaining = find_gaining_cycle(sources, dest[epsilon_arcs], score[epsilon_arcs])
        if gaining is not None:
            arc = int(epsilon_arcs[gaining])
            raise GraphError(
                f"arc {arc}, from state {sources[gaining]} to {dest[arc]}, lies on a cycle of epsilon arcs and has the "
                f"positive score {score[arc]}: going round could gain without end. Remove epsilons where the graph is "
                "built, or give every arc of the cycle a score of at most 0.",
                arc,
                "score",
            )
        epsilon_count = np.bincount(sources, minlength=len(arc_begin) - 1).astype(np.int32)
        epsilon_count.flags.writeable = False
        return cls(
            arc_begin, dest, label, score, word_begin, words, epsilon_count,
            max_label=int(label.max()), has_epsilons=len(epsilon_arcs) > 0,
            symbols=word_table, tokens=token_table, note=note,
        )  # fmt: skip


def graph_from_arcs(
    arcs: Iterable[Arc],
    num_states: int,
    *,
    symbols: Sequence[str] = (),
    tokens: Sequence[str] = (),
    note: str = "",
) -> Graph:
    """A small graph from ``(source, destination, label, score, words)``, in any order of sources; see ``checked``."""
    rows = list(arcs)
    word_counts = np.array([len(row[4]) for row in rows], dtype=np.int64)
    flat = [word for row in rows for word in row[4]]
    return sorted_graph(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int32),
        np.array([row[2] for row in rows], dtype=np.int32),
        np.array([row[3] for row in rows], dtype=np.float32),
        word_counts,
        np.array(flat, dtype=np.int32),
        num_states,
        symbols=symbols,
        tokens=tokens,
        note=note,
    )


def sorted_graph(
    source: npt.NDArray[np.int64],
    dest: npt.NDArray[np.int32],
    label: npt.NDArray[np.int32],
    score: npt.NDArray[np.float32],
    word_counts: npt.NDArray[np.int64],
    words: npt.NDArray[np.int32],
    num_states: int,
    *,
    symbols: Sequence[str] = (),
    tokens: Sequence[str] = (),
    note: str = "",
) -> Graph:
    """A graph from arcs with a source each, sorted by it here; arcs of one state keep their order.

    ``source`` int64 and ``word_counts`` int64 ``(num_arcs,)``; the other arrays as in :class:`Graph`.
    """
    outside = np.flatnonzero((source < 0) | (source >= num_states))
    if len(outside):
        arc = int(outside[0])
        raise GraphError(f"arc {arc} leaves state {source[arc]}, but there are {num_states} states.", arc)
    word_begin = np.zeros(len(source) + 1, dtype=np.int64)
    np.cumsum(word_counts, out=word_begin[1:])
    if np.any(source[1:] < source[:-1]):
        order = np.argsort(source, kind="stable")
        dest, label, score = dest[order], label[order], score[order]
        counts = word_counts[order]
        begins = np.repeat(word_begin[:-1][order], counts)
        np.cumsum(counts, out=word_begin[1:])
        words = words[begins + np.arange(len(words)) - np.repeat(word_begin[:-1], counts)]
    arc_begin = np.zeros(num_states + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=num_states), out=arc_begin[1:])
    return Graph.checked(arc_begin, dest, label, score, word_begin, words, symbols=symbols, tokens=tokens, note=note)


def _flat(array: npt.NDArray[_Scalar], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    """A read-only, contiguous view of ``array``; ``GraphError`` for another type or more than one dimension."""
    if array.dtype != dtype or array.ndim != 1:
        raise GraphError(f"an array of a graph is {array.dtype} {array.shape}, expected 1-D {np.dtype(dtype)}.")
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


def _check_sizes(
    arc_begin: npt.NDArray[np.int64],
    dest: npt.NDArray[np.int32],
    label: npt.NDArray[np.int32],
    score: npt.NDArray[np.float32],
    word_begin: npt.NDArray[np.int64],
    words: npt.NDArray[np.int32],
) -> None:
    num_arcs = len(dest)
    if len(arc_begin) < 3:
        raise GraphError(f"a graph has a start and a super-final state, got {max(len(arc_begin) - 1, 0)} states.")
    if num_arcs == 0:
        raise GraphError("a graph without arcs accepts nothing.")
    for name, size, expected in (
        ("label", len(label), num_arcs),
        ("score", len(score), num_arcs),
        ("word_begin", len(word_begin), num_arcs + 1),
    ):
        if size != expected:
            raise GraphError(f"{name} has {size} elements, expected {expected} for {num_arcs} arcs.")
    _check_offsets("arc_begin", arc_begin, num_arcs)
    _check_offsets("word_begin", word_begin, len(words))


def _check_offsets(name: str, begin: npt.NDArray[np.int64], size: int) -> None:
    if begin[0] != 0:
        raise GraphError(f"{name}[0] is {begin[0]}, expected 0.", 0, name)
    if begin[-1] != size:
        raise GraphError(f"{name}[{len(begin) - 1}] is {begin[-1]}, expected {size}.", len(begin) - 1, name)
    falling = np.flatnonzero(begin[1:] < begin[:-1])
    if len(falling):
        at = int(falling[0]) + 1
        raise GraphError(f"{name}[{at}] is {begin[at]}, less than the offset {begin[at - 1]} before it.", at, name)


def _check_ranges(
    arc_begin: npt.NDArray[np.int64],
    dest: npt.NDArray[np.int32],
    label: npt.NDArray[np.int32],
    score: npt.NDArray[np.float32],
    words: npt.NDArray[np.int32],
    num_symbols: int,
) -> None:
    last = len(arc_begin) - 2
    _refuse_any("dest", dest, (dest < 0) | (dest > last), f"a state is 0 to {last}")
    _refuse_any("label", label, label < EPSILON, f"labels are columns, {FINAL} (final) or {EPSILON} (epsilon)")
    _refuse_any("score", score, ~np.isfinite(score), "scores are finite")
    _refuse_any("words", words, words < 1, "word ids start at 1")
    if num_symbols:
        _refuse_any("words", words, words >= num_symbols, f"the table of words ends at {num_symbols - 1}")
    if arc_begin[last] != len(dest):
        raise GraphError(f"arc {arc_begin[last]} leaves the super-final state {last}.", int(arc_begin[last]), "dest")
    wrong = (label == FINAL) != (dest == last)
    _refuse_any("label", label, wrong, f"the arcs into the last state {last}, and only those, have the label {FINAL}")


def _refuse_any(
    name: str, array: npt.NDArray[np.int32] | npt.NDArray[np.float32], wrong: npt.NDArray[np.bool_], allowed: str
) -> None:
    # argmax stops at the first True and makes no list of indexes.
    at = int(wrong.argmax()) if len(wrong) else 0
    if len(wrong) and wrong[at]:
        raise GraphError(f"{name}[{at}] is {array[at]}; {allowed}.", at, name)
