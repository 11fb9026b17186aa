"""Grammars: acceptors of word sequences, from a back-off model, from sentences, or from a transducer's text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from oasr_core.errors import did_you_mean
from oasr_wfst.arpa import Arpa, Ngrams
from oasr_wfst.errors import GraphError
from oasr_wfst.fst import EPSILON_SYMBOLS, Fst
from oasr_wfst.lexicon import BACKOFF, Lexicon
from oasr_wfst.openfst_format import read_openfst
from oasr_wfst.openfst_text import names_labels, read_openfst_text
from oasr_wfst.text_lines import numbered_fields

#: Names of files that hold a transducer; any other grammar is a list of sentences.
_TEXT_SUFFIX, _BINARY_SUFFIX = (".fst.txt", ".fst")
_EMPTY_HISTORY: Final = 0


class _Histories:
    """Which n-grams are states of the grammar, and which state follows a sequence of words.

    A history is a state if longer n-grams begin with it. The context behind any other n-gram is a shorter history, and
    the back-off weights on the way there are paid at once.
    """

    def __init__(self, arpa: Arpa) -> None:
        self.arpa = arpa
        self._width = arpa.end_word + 1
        self._keys: list[npt.NDArray[np.int64]] = []
        self._rows: list[npt.NDArray[np.int64]] = []
        for order, ngrams in enumerate(arpa.orders, start=1):
            self._index(order, ngrams)
        self.states = [np.full(len(ngrams.words), -1, dtype=np.int64) for ngrams in arpa.orders[:-1]]
        self.count = 1
        for order, states in enumerate(self.states, start=1):
            longer = arpa.orders[order].words
            begun = self.rows(longer[:, :order])
            if order == 1:
                begun = np.concatenate([begun, self.rows(np.array([[arpa.begin_word]]))])
            extended = np.unique(begun[begun >= 0])
            states[extended] = self.count + np.arange(len(extended))
            self.count += len(extended)

    def rows(self, words: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Row of each n-gram of ``words`` ``(count, order)`` in its order, -1 where the model has none."""
        rows = np.zeros(len(words), dtype=np.int64)
        for order in range(1, words.shape[1] + 1):
            keys = self._keys[order - 1]
            wanted = rows * self._width + words[:, order - 1]
            at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            found = (rows >= 0) & (keys[at] == wanted) if len(keys) else np.zeros(len(words), dtype=np.bool_)
            rows = np.where(found, self._rows[order - 1][at], -1) if len(keys) else np.full(len(words), -1)
        return rows

    def after(self, words: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The state after each sequence, and the logarithm of the back-off weights paid on the way there."""
        state = np.full(len(words), _EMPTY_HISTORY, dtype=np.int64)
        paid = np.zeros(len(words), dtype=np.float32)
        open_ = np.ones(len(words), dtype=np.bool_)
        for order in range(min(words.shape[1], len(self.states)), 0, -1):
            rows = self.rows(words[:, words.shape[1] - order :])
            known = open_ & (rows >= 0)
            here = np.where(known, self.states[order - 1][rows], -1)
            state[here >= 0] = here[here >= 0]
            open_ &= here < 0
            passing = known & open_
            paid[passing] += self.arpa.orders[order - 1].backoff[rows[passing]]
        return state, paid

    def _index(self, order: int, ngrams: Ngrams) -> None:
        history = self.rows(ngrams.words[:, :-1])
        orphans = np.flatnonzero(history < 0)
        if len(orphans):
            self._refuse(ngrams, int(orphans[0]), f"a {order}-gram whose first {order - 1} words are no n-gram")
        keys = history * self._width + ngrams.words[:, -1]
        rows = np.argsort(keys, kind="stable")
        keys = keys[rows]
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if len(again):
            self._refuse(ngrams, int(rows[again[0] + 1]), "an n-gram that the file has already")
        self._keys.append(keys)
        self._rows.append(rows)

    def _refuse(self, ngrams: Ngrams, row: int, problem: str) -> None:
        line = int(ngrams.line[row])
        raise GraphError(f"{self.arpa.path}, line {line}: {problem}.", line)


def grammar_from_arpa(arpa: Arpa, backoff_label: int) -> Fst:
    """The acceptor of a back-off model: a state for each history, back-off arcs with ``backoff_label`` and no output.

    ``</s>`` becomes the cost of ending. Raises ``GraphError`` where the model has no ``</s>``, an n-gram without its
    history, or an n-gram twice.
    """
    histories = _Histories(arpa)
    final = np.full(histories.count, np.inf, dtype=np.float32)
    arcs: list[tuple[npt.NDArray[np.generic], ...]] = []
    for order, ngrams in enumerate(arpa.orders, start=1):
        words = ngrams.words
        if order == 1:
            source = np.full(len(words), _EMPTY_HISTORY, dtype=np.int64)
        else:
            source = histories.states[order - 2][histories.rows(words[:, :-1])]
        ends = words[:, -1] == arpa.end_word
        # A sentence begins once and ends once; n-grams that say otherwise predict nothing.
        possible = (words[:, -1] != arpa.begin_word) & ~np.any(words[:, :-1] == arpa.end_word, axis=1)
        possible &= ~np.any(words[:, 1:-1] == arpa.begin_word, axis=1)
        final[source[ends & possible]] = -ngrams.log_prob[ends & possible]
        inner = possible & ~ends
        dest, paid = histories.after(words[inner])
        arcs.append((source[inner], dest, words[inner, -1], -(ngrams.log_prob[inner] + paid)))
        if order < len(arpa.orders):
            is_state = histories.states[order - 1] >= 0
            dest, paid = histories.after(words[is_state, 1:])
            labels = np.full(len(dest), backoff_label, dtype=np.int32)
            arcs.append((histories.states[order - 1][is_state], dest, labels, -(ngrams.backoff[is_state] + paid)))
    if not np.any(final != np.inf):
        raise GraphError(f"{arpa.path} has no </s>, so no sentence of it can end.")
    start = histories.after(np.array([[arpa.begin_word]], dtype=np.int32))[0]
    source, dest, label, cost = (np.concatenate(column) for column in zip(*arcs, strict=True))
    order_ = np.argsort(source, kind="stable")
    ilabel = label[order_].astype(np.int32)
    return Fst(
        start=int(start[0]),
        final=final,
        source=source[order_].astype(np.int64),
        ilabel=ilabel,
        olabel=np.where(ilabel == backoff_label, 0, ilabel).astype(np.int32),
        cost=cost[order_].astype(np.float32),
        dest=dest[order_].astype(np.int32),
    )


def read_grammar(path: str | Path, lexicon: Lexicon, *, repeat: bool = False) -> Fst:
    """The acceptor of a grammar file: a transducer named ``*.fst.txt`` or ``*.fst``, else sentences.

    Sentences stand one on a line, equally likely (each costs the logarithm of their number); with ``repeat`` any
    sequence of them, at least one, is accepted at the sum of their costs. Lines that begin with ``#`` are comments.
    In a transducer words are named, or numbered as in the table that the lexicon was read with; ``#0`` marks back-off
    arcs. Raises ``GraphError`` naming file and line for a word that the lexicon does not have.
    """
    path = Path(path)
    if path.name.endswith((_TEXT_SUFFIX, _BINARY_SUFFIX)):
        if repeat:
            raise GraphError(f"{path}: repeat belongs to lists of sentences, a transducer says itself what repeats.")
        return _read_transducer(path, lexicon)
    return _sentences(path, lexicon.word_ids(), repeat)


def _sentences(path: Path, ids: Mapping[str, int], repeat: bool) -> Fst:
    chains: dict[tuple[int, ...], None] = {}
    for line, words in numbered_fields(path):
        if words[0].startswith("#"):
            continue
        unknown = next((word for word in words if word not in ids), None)
        if unknown is not None:
            raise _no_pronunciation(path, line, unknown, ids)
        chains[tuple(ids[word] for word in words)] = None
    if not chains:
        raise GraphError(f"{path} has no sentences.")
    cost = math.log(len(chains))
    # State 0 is the start, state 1 the end.
    rows: list[tuple[int, int, int, float]] = [(1, 0, 0, 0.0)] if repeat else []
    free = 2
    for chain in chains:
        states = [0, *range(free, free + len(chain) - 1), 1]
        free += len(chain) - 1
        rows.extend(zip(states[:-1], states[1:], chain, [cost, *[0.0] * (len(chain) - 1)], strict=True))
    rows.sort(key=lambda row: row[0])
    final = np.full(free, np.inf, dtype=np.float32)
    final[1] = 0
    label = np.array([row[2] for row in rows], dtype=np.int32)
    return Fst(
        start=0,
        final=final,
        source=np.array([row[0] for row in rows], dtype=np.int64),
        ilabel=label,
        olabel=label,
        cost=np.array([row[3] for row in rows], dtype=np.float32),
        dest=np.array([row[1] for row in rows], dtype=np.int32),
    )


def _read_transducer(path: Path, lexicon: Lexicon) -> Fst:
    ids = {text: number for number, text in enumerate(lexicon.symbols) if text}
    ids |= {BACKOFF: lexicon.backoff_word, **dict.fromkeys(EPSILON_SYMBOLS[:2], 0)}
    if path.name.endswith(_TEXT_SUFFIX):
        # Numbers mean ids only where the ids are given; else they are words, such as "7".
        inputs, outputs = names_labels(path) if lexicon.fixed_ids else (True, True)
        reader = ids.__getitem__
        try:
            fst, lines = read_openfst_text(path, reader if inputs else int, reader if outputs else int)
        except GraphError as error:
            if lexicon.fixed_ids or names_labels(path)[0]:
                raise
            raise GraphError(f"{error} Numbers are word ids if their table is given: --words.", error.offset) from None
    elif lexicon.fixed_ids:
        fst = read_openfst(path)
        lines = np.zeros(fst.num_arcs, dtype=np.int64)
    else:
        raise GraphError(f"{path} has word ids, give the table that they belong to: --words words.txt.")
    spoken = lexicon.word_ids()
    known = np.array([0, lexicon.backoff_word, *spoken.values()])
    strange = np.flatnonzero(~np.isin(fst.ilabel, known))
    if len(strange):
        arc = int(strange[0])
        number = int(fst.ilabel[arc])
        word = lexicon.symbols[number] if 0 <= number < len(lexicon.symbols) else str(number)
        raise _no_pronunciation(path, int(lines[arc]), word, spoken)
    olabel = np.where(fst.olabel == lexicon.backoff_word, 0, fst.olabel).astype(np.int32)
    order = np.argsort(fst.source, kind="stable")
    return Fst(
        start=fst.start, final=fst.final, source=fst.source[order], ilabel=fst.ilabel[order], olabel=olabel[order],
        cost=fst.cost[order], dest=fst.dest[order],
    )  # fmt: skip


def _no_pronunciation(path: Path, line: int, word: str, ids: Mapping[str, int]) -> GraphError:
    place = f"{path}, line {line}" if line else str(path)
    hint = next((f" Did you mean {case!r}?" for case in (word.upper(), word.lower()) if case in ids), "")
    hint = hint or did_you_mean(word, ids)
    return GraphError(f"{place}: {word!r} has no pronunciation in the lexicon.{hint}", line or None)
