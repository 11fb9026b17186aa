"""Context graphs of many streams as one automaton in tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_core.decoding.context import ContextArrays, ContextGraph

_KEPT_AUTOMATA = 16


class Automaton:
    """Distinct context graphs side by side: the states of graph ``i`` begin at ``roots[i]``, its empty sequence.

    ``tokens`` are all labels of all phrases, sorted; ``pending`` and ``reward`` are those of
    :class:`~oasr_core.decoding.context.ContextArrays`, by state.
    """

    def __init__(self, graphs: Sequence[ContextGraph], device: torch.device) -> None:
        arrays = [graph.arrays for graph in graphs]
        sizes = [len(graph) for graph in graphs]
        self.roots = np.cumsum([0, *sizes])[:-1].tolist()
        parts = list(zip(arrays, sizes, self.roots, strict=True))
        keys = [_arc_keys(part, size, root) for part, size, root in parts]
        targets = [part.arc_target.astype(np.int64) + root for part, _, root in parts]
        fails = [np.where(part.fail < 0, -1, part.fail.astype(np.int64) + root) for part, _, root in parts]
        self._keys = torch.from_numpy(np.concatenate(keys)).to(device)
        self._targets = torch.from_numpy(np.concatenate(targets)).to(device)
        self._fail = torch.from_numpy(np.concatenate(fails)).to(device)
        self._links = max(_longest_chain(part.fail.tolist()) for part in arrays)
        tokens = np.unique(np.concatenate([part.arc_token for part in arrays])).astype(np.int64)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.pending = torch.from_numpy(np.concatenate([part.pending for part in arrays])).to(device)
        self.reward = torch.from_numpy(np.concatenate([part.reward for part in arrays])).to(device)

    def follow(self, state: Tensor, token: Tensor, root: Tensor) -> Tensor:
        """The states behind ``token``, int64; ``state`` and ``token`` broadcast, ``root`` to them."""
        state, token = state + torch.zeros_like(token), token + torch.zeros_like(state)
        result = root.expand_as(state)
        searching = torch.ones_like(result, dtype=torch.bool)
        for _ in range(self._links):
            wanted = (state << 32) | token
            place = torch.searchsorted(self._keys, wanted).clamp(max=len(self._keys) - 1)
            found = searching & (self._keys[place] == wanted)
            result = torch.where(found, self._targets[place], result)
            state = self._fail[state]
            searching = searching & ~found & (state >= 0)
            state = state.clamp(min=0)
        return result


def _arc_keys(arrays: ContextArrays, size: int, root: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Sorted: the state in the upper half, the token in the lower."""
    states = np.repeat(np.arange(size, dtype=np.int64), np.diff(arrays.arc_begin)) + root
    return (states << 32) | arrays.arc_token


def _longest_chain(fail: Sequence[int]) -> int:
    """States on the longest way along fail links, its start included."""
    depths: dict[int, int] = {-1: 0}

    def depth(state: int) -> int:
        way = []
        while state not in depths:
            way.append(state)
            state = fail[state]
        for passed in reversed(way):
            depths[passed] = depths[fail[passed]] + 1
        return depths[way[0]] if way else depths[state]

    return max(depth(state) for state in range(len(fail)))


class Automata:
    """The automata of the latest sets of graphs."""

    def __init__(self) -> None:
        self._known: OrderedDict[frozenset[int], tuple[Automaton, list[ContextGraph]]] = OrderedDict()

    def of(self, graphs: Sequence[ContextGraph], device: torch.device) -> tuple[Automaton | None, list[int]]:
        """One automaton of all ``graphs``, and the root of each; ``None`` where no graph has a phrase."""
        distinct = {id(graph): graph for graph in graphs}
        if all(len(graph) == 1 for graph in distinct.values()):
            return None, [0] * len(graphs)
        known = self._known.get(key := frozenset(distinct))
        if known is None:
            ordered = list(distinct.values())  # held, so that no other graph gets the id of one of them
            known = self._known[key] = (Automaton(ordered, device), ordered)
            if len(self._known) > _KEPT_AUTOMATA:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        automaton, ordered = known
        roots = {id(graph): root for graph, root in zip(ordered, automaton.roots, strict=True)}
        return automaton, [roots[id(graph)] for graph in graphs]
