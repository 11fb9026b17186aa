"""The lexicon: words and the tokens that spell them, as a transducer from tokens to words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from oasr_core.errors import did_you_mean
from oasr_wfst.errors import GraphError
from oasr_wfst.fst import EPSILON_SYMBOLS, Fst
from oasr_wfst.symbols import SymbolTable
from oasr_wfst.text_lines import numbered_fields

#: Symbols that keep determinization possible; they are no tokens of a model.
DISAMBIGUATION: Final = re.compile(r"#\d+")
#: Symbol of the grammar's back-off arcs.
BACKOFF: Final = "#0"
#: Words that grammars give a meaning of their own.
_RESERVED: Final = (*EPSILON_SYMBOLS[:2], BACKOFF, "<s>", "</s>")


@dataclass(frozen=True)
class Lexicon:
    """Pronunciations: ``words[i]`` (an id) is spelled ``spellings[i]`` (columns, at least one)."""

    words: Sequence[int]
    spellings: Sequence[tuple[int, ...]]
    #: word id -> text, with ``<eps>`` at 0
    symbols: SymbolTable
    #: column -> text, without disambiguation symbols
    tokens: SymbolTable
    #: whether the word ids were given, by a table
    fixed_ids: bool

    def word_ids(self) -> dict[str, int]:
        """Ids of the words that have a pronunciation, by text."""
        return {self.symbols[word]: word for word in self.words}

    @property
    def backoff_word(self) -> int:
        """Id of the grammar's back-off symbol: that of ``#0`` in the table, else the first free one."""
        texts = list(self.symbols)
        return texts.index(BACKOFF) if BACKOFF in texts else len(texts)

    @property
    def backoff_label(self) -> int:
        """Input label of the back-off symbol; larger labels keep pronunciations apart, smaller ones are tokens."""
        return len(self.tokens) + 1

    def transducer(self) -> Fst:
        """Input: column + 1, then disambiguation labels from :attr:`backoff_label`; output: word ids.

        Every pronunciation is a loop through state 0 that gives its word on its first arc. Pronunciations that another
        one equals or begins with end in a disambiguation label of their own.
        """
        marks = _disambiguation_marks(self.spellings)
        rows: list[tuple[int, int, int, int]] = [(0, 0, self.backoff_label, self.backoff_word)]
        free = 1
        for word, spelling, mark in zip(self.words, self.spellings, marks, strict=True):
            labels = [column + 1 for column in spelling]
            if mark:
                labels.append(self.backoff_label + mark)
            states = [0, *range(free, free + len(labels) - 1), 0]
            free += len(labels) - 1
            outputs = [word, *[0] * (len(labels) - 1)]
            rows.extend(zip(states[:-1], states[1:], labels, outputs, strict=True))
        columns = np.array(rows, dtype=np.int64)[np.argsort([row[0] for row in rows], kind="stable")]
        final = np.full(free, np.inf, dtype=np.float32)
        final[0] = 0
        return Fst(
            start=0,
            final=final,
            source=columns[:, 0].copy(),
            ilabel=columns[:, 2].astype(np.int32),
            olabel=columns[:, 3].astype(np.int32),
            cost=np.zeros(len(rows), dtype=np.float32),
            dest=columns[:, 1].astype(np.int32),
        )


def read_lexicon(path: str | Path, tokens: SymbolTable, words: SymbolTable | None = None) -> Lexicon:
    """The lexicon of a file of lines ``WORD TOKEN TOKEN ...``; a word may have several.

    ``tokens`` is the model's table: column -> text, the blank at 0. ``words`` fixes the word ids; without it words are
    numbered in the order of the file, ``<eps>`` is 0. Disambiguation symbols (``#1``) in the file are left out; they
    are worked out anew. Raises ``GraphError`` naming file and line for a token or word that has no id, a word without
    tokens, and the blank as a token.
    """
    path = Path(path)
    columns = {text: column for column, text in enumerate(tokens) if text and not DISAMBIGUATION.fullmatch(text)}
    numbered = words is not None
    ids = {text: number for number, text in enumerate(words) if text} if words is not None else {"<eps>": 0}
    entries: dict[tuple[int, tuple[int, ...]], None] = {}
    for line, (word, *spelling) in numbered_fields(path):
        if word in _RESERVED:
            raise GraphError(f"{path}, line {line}: {word!r} cannot be a word of the lexicon.", line)
        if word not in ids:
            if numbered:
                raise GraphError(f"{path}, line {line}: {word!r} is not in the table of words.", line)
            ids[word] = len(ids)
        entries[ids[word], _columns(path, line, word, spelling, columns)] = None
    if not entries:
        raise GraphError(f"{path} has no words.")
    size = 1 + max(columns.values())
    return Lexicon(
        words=[word for word, _ in entries],
        spellings=[spelling for _, spelling in entries],
        symbols=words if words is not None else SymbolTable.of(ids),
        tokens=SymbolTable.of(tokens[:size]),
        fixed_ids=numbered,
    )


def _columns(path: Path, line: int, word: str, spelling: list[str], columns: dict[str, int]) -> tuple[int, ...]:
    try:
        found = tuple(columns[token] for token in spelling if not DISAMBIGUATION.fullmatch(token))
    except KeyError as error:
        token = error.args[0]
        raise GraphError(
            f"{path}, line {line}: token {token!r} of {word!r} is not in the table of tokens."
            f"{did_you_mean(token, columns)} A lexicon is written in the tokens of its model.",
            line,
        ) from None
    if not found or 0 in found:
        problem = "is spelled with the blank" if found else "has no tokens"
        raise GraphError(f"{path}, line {line}: {word!r} {problem}.", line)
    return found


def _disambiguation_marks(spellings: Sequence[tuple[int, ...]]) -> list[int]:
    """0 for a spelling that is unique and begins no other one, else its number among its equals, from 1."""
    count = Counter(spellings)
    beginnings = {spelling[:size] for spelling in count for size in range(1, len(spelling))}
    used: Counter[tuple[int, ...]] = Counter()
    marks = []
    for spelling in spellings:
        if count[spelling] > 1 or spelling in beginnings:
            used[spelling] += 1
            marks.append(used[spelling])
        else:
            marks.append(0)
    return marks
