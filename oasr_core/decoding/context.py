"""Hotwords as an automaton: phrases in token ids, what each token adds, and what a broken match gives back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


class ContextArrays(NamedTuple):
    """A :class:`ContextGraph` in flat arrays, for compiled and tensor code.

    State ``s`` has the arcs ``arc_begin[s]:arc_begin[s + 1]``, sorted by ``arc_token``, to ``arc_target``; a token
    without an arc is looked up in ``fail[s]``, and so on to the root, state 0, whose ``fail`` is -1. ``pending[s]`` is
    the credit of the unfinished match, ``reward[s]`` what entering ``s`` completes.
    """

    arc_begin: Ints
    arc_token: Ints
    arc_target: Ints
    fail: Ints
    pending: Floats
    reward: Floats


class ContextGraph:
    """Scores token sequences by the phrases in them, one token at a time.

    A phrase has a boost of either sign for each of its tokens. The score of a sequence is

    - for every occurrence of every phrase in it, also overlapping and nested ones: the boost times its length; and
    - while the end of the sequence is the beginning of a phrase: the boost times the tokens matched so far. This part
      is *pending*: it is given back exactly when the match breaks or the sequence ends (:meth:`finalize`). The longest
      match that can still go on counts, and of the phrases that share it the largest boost.

    States are small integers; :attr:`start` is that of the empty sequence. The state is a function of the tokens alone,
    so hypotheses that spell the same share it. A phrase that is given twice has its last boost, so that boost 0 takes
    one back; a phrase with boost 0, or without tokens, changes nothing.
    """

    #: State of the empty sequence.
    start = 0

    def __init__(self, phrases: Iterable[tuple[Sequence[int], float]] = ()) -> None:
        """Build from ``(token ids, boost per token)`` pairs."""
        boosts = {tuple(int(token) for token in tokens): float(boost) for tokens, boost in phrases}
        self._next: list[dict[int, int]] = [{}]
        self._fail = [-1]
        self._pending = [0.0]
        self._reward = [0.0]
        for tokens, boost in boosts.items():
            if tokens and boost != 0.0:
                self._add(tokens, boost)
        self._link()

    def __len__(self) -> int:
        """Number of states."""
        return len(self._next)

    def advance(self, state: int, token: int) -> tuple[int, float]:
        """Follow ``token``: the next state, and what the score of the sequence changes by."""
        following = self._follow(state, token)
        return following, self._pending[following] + self._reward[following] - self._pending[state]

    def finalize(self, state: int) -> float:
        """What the score changes by when the sequence ends here: the pending part, given back."""
        return 0.0 - self._pending[state]

    @cached_property
    def arrays(self) -> ContextArrays:
        """The automaton in flat arrays."""
        arcs = [sorted(following.items()) for following in self._next]
        flat = [arc for state_arcs in arcs for arc in state_arcs]
        return ContextArrays(
            arc_begin=np.cumsum([0, *map(len, arcs)], dtype=np.int32),
            arc_token=np.array([token for token, _ in flat], dtype=np.int32),
            arc_target=np.array([target for _, target in flat], dtype=np.int32),
            fail=np.array(self._fail, dtype=np.int32),
            pending=np.array(self._pending, dtype=np.float64),
            reward=np.array(self._reward, dtype=np.float64),
        )

    def _add(self, tokens: Sequence[int], boost: float) -> None:
        state = 0
        for depth, token in enumerate(tokens, start=1):
            following = self._next[state].get(token)
            if following is None:
                following = self._next[state][token] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._pending.append(0.0)
                self._reward.append(0.0)
                fresh = True
            else:
                fresh = not self._next[following]
            state = following
            if depth < len(tokens):
                credit = boost * depth
                self._pending[state] = credit if fresh else max(self._pending[state], credit)
        self._reward[state] += boost * len(tokens)

    def _link(self) -> None:
        """Fail links, breadth first; a state completes, and at a phrase's end awaits, what its fail state does."""
        queue = list(self._next[0].values())
        for state in queue:
            self._reward[state] += self._reward[self._fail[state]]
            if not self._next[state]:
                self._pending[state] = self._pending[self._fail[state]]
            for token, following in self._next[state].items():
                self._fail[following] = self._follow(self._fail[state], token)
                queue.append(following)

    def _follow(self, state: int, token: int) -> int:
        while state >= 0:
            following = self._next[state].get(token)
            if following is not None:
                return following
            state = self._fail[state]
        return 0
