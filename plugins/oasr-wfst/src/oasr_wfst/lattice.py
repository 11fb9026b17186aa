"""Lattices: the paths of an utterance that are within the output beam, and their forms outside of this package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oasr_wfst.graph import EPSILON, FINAL, Graph
from oasr_wfst.lattice_search import order_epsilons
from oasr_wfst.recorder import LatticeRecorder
from oasr_wfst.tokens import NO_ARC, Doubles, Ints, Longs


@dataclass(frozen=True, eq=False)
class Lattice:
    """Arcs sorted by source; every arc goes from a lower node to a higher one, and no epsilon cycle is left.

    Node 0 is the start, node ``num_nodes - 1`` the only end. All arrays are ``(arcs,)``.
    """

    num_nodes: int
    source: Ints
    dest: Ints
    #: column of the log posteriors, ``EPSILON`` or, into the last node and only there, ``FINAL``
    label: Ints
    #: score of the graph's arc and log posterior of its label, natural logarithm
    score: Doubles
    #: word id; 0: none
    word: Ints
    #: frame that the arc consumes, counted from the start of the utterance; -1: none
    frame: Longs

    @classmethod
    def of(cls, graph: Graph, recorder: LatticeRecorder, frames: Longs) -> Lattice:
        """What ``recorder`` holds after its end; ``frames`` are the frames of its steps."""
        order = _node_order(recorder)
        used = int(recorder.bounds[recorder.num_steps, 1])
        found = recorder.arcs
        begins = recorder.bounds[: recorder.num_steps + 1]
        step = np.searchsorted(begins[:, 1], np.arange(used), side="right") - 1
        source, dest = order[found.source[:used]], order[found.dest[:used]]
        arc = found.arc[:used]
        label = np.where(arc == NO_ARC, FINAL, graph.label[arc]).astype(np.int32)
        label[step == recorder.num_steps - 1] = FINAL
        frame = np.where(label >= 0, frames[np.clip(step - 1, 0, len(frames) - 1)] if len(frames) else 0, -1)
        forward = np.flatnonzero(source < dest)
        return _spelled(
            graph,
            len(order),
            source[forward],
            dest[forward],
            label[forward],
            found.score[:used][forward],
            frame[forward],
            arc[forward],
        )

    @property
    def num_arcs(self) -> int:
        """Arcs, with those into the last node."""
        return len(self.label)

    def to_k2(self) -> dict[str, Tensor]:
        """The lattice in the form in which k2 writes an Fsa with ``torch.save(fsa.as_dict(), path)``.

        ``arcs`` int32 ``(arcs, 4)``: source, destination, label, score as the bits of a float32. ``aux_labels`` int32
        ``(arcs,)``: word, 0 for none, -1 into the last state. Epsilon arcs have the label 0, as blanks have; the
        attribute ``frames`` int32 ``(arcs,)``, -1 where no frame is consumed, tells them apart.
        """
        label = np.where(self.label == EPSILON, 0, self.label)
        bits = self.score.astype(np.float32).view(np.int32)
        arcs = np.stack([self.source, self.dest, label, bits], axis=1).astype(np.int32)
        words = np.where(self.label == FINAL, -1, self.word).astype(np.int32)
        return {
            "arcs": torch.from_numpy(arcs),
            "aux_labels": torch.from_numpy(words),
            "frames": torch.from_numpy(self.frame.astype(np.int32)),
        }

    def to_openfst(self) -> str:
        """Text that ``fstcompile`` reads: input label = column + 1, 0 for epsilon; costs are negated scores."""
        consumed = np.where(self.label >= 0, self.label + 1, 0)
        columns = zip(self.source, self.dest, consumed, self.word, self.score, strict=True)
        lines = [f"{source} {dest} {label} {word} {-score:.9g}" for source, dest, label, word, score in columns]
        return "\n".join([*lines, f"{self.num_nodes - 1} 0"]) + "\n"


def _node_order(recorder: LatticeRecorder) -> Ints:
    """The new place of every node; places rise along epsilon arcs too."""
    begins = recorder.bounds[: recorder.num_steps + 1]
    order = np.arange(begins[-1, 0], dtype=np.int32)
    for step in np.flatnonzero(begins[:-1, 2] < begins[1:, 1]):
        first, last = begins[step, 0], begins[step + 1, 0]
        order[first:last] = first + order_epsilons(recorder.nodes, recorder.arcs, recorder.bounds, int(step))
    return order


def _spelled(
    graph: Graph,
    num_nodes: int,
    source: Ints,
    dest: Ints,
    label: Ints,
    score: Doubles,
    frame: Longs,
    arc: Ints,
) -> Lattice:
    """Give every arc its word; an arc of several becomes a chain, and so does a last arc that has one."""
    known = np.maximum(arc, 0)
    counts = np.where(arc == NO_ARC, 0, graph.word_begin[known + 1] - graph.word_begin[known])
    is_final = label == FINAL
    links = np.where(is_final, counts + 1, np.maximum(counts, 1))
    total = int(links.sum())
    owner = np.repeat(np.arange(len(arc)), links)
    link = np.arange(total) - np.repeat(np.cumsum(links) - links, links)
    is_first, is_last = link == 0, link == links[owner] - 1
    has_word = link < counts[owner]
    place = np.where(has_word, graph.word_begin[known[owner]] + link, 0)
    word = np.where(has_word, graph.words[place] if len(graph.words) else 0, 0)
    # Nodes inside of chains lie between their ends; fractions keep the order of all nodes, then all are renumbered.
    inner = np.flatnonzero(~is_last)
    keys = np.concatenate([np.arange(num_nodes, dtype=np.float64), source[owner[inner]] + (link[inner] + 1) / 1e6])
    new_place = np.empty(len(keys), np.int32)
    new_place[np.argsort(keys, kind="stable")] = np.arange(len(keys), dtype=np.int32)
    end = np.empty(total, np.int64)
    end[inner] = num_nodes + np.arange(len(inner))
    end[is_last] = dest
    begin = np.where(is_first, source[owner], np.roll(end, 1))
    # The frame is consumed by the first arc of a chain, the super-final state entered by the last.
    carried = np.where(is_final[owner], is_last, is_first)
    result_source = new_place[begin]
    order = np.argsort(result_source, kind="stable")
    return Lattice(
        num_nodes=len(keys),
        source=result_source[order],
        dest=new_place[end][order],
        label=np.where(carried, label[owner], EPSILON).astype(np.int32)[order],
        score=np.where(carried, score[owner], 0.0)[order],
        word=word.astype(np.int32)[order],
        frame=np.where(carried, frame[owner], -1)[order],
    )
