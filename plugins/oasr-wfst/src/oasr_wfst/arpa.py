"""Back-off language models in ARPA form, read line by line into arrays."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from oasr_core.errors import did_you_mean
from oasr_wfst.errors import GraphError
from oasr_wfst.text_lines import numbered_fields

_LN10: Final = math.log(10.0)
#: How language models spell the class of all words that they do not know.
_UNKNOWN: Final = ("<unk>", "<UNK>")
_COUNT: Final = re.compile(r"(\d+)=(\d+)")


@dataclass(frozen=True, eq=False)
class Ngrams:
    """All n-grams of one order, in the order of the file."""

    #: int32 ``(count, order)``
    words: npt.NDArray[np.int32]
    #: float32 ``(count,)``: natural logarithm of the probability
    log_prob: npt.NDArray[np.float32]
    #: float32 ``(count,)``: natural logarithm of the back-off weight, 0 where the file has none
    backoff: npt.NDArray[np.float32]
    #: int32 ``(count,)``: line of the file, from 1
    line: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Arpa:
    """A back-off model: n-grams by order, from 1; word ids as given, then those of ``<s>`` and ``</s>``."""

    path: Path
    orders: tuple[Ngrams, ...]
    begin_word: int
    end_word: int
    #: n-grams left out because a word of theirs has no id
    skipped: int


class _Columns:
    """N-grams of one order while they are read."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.words, self.log_prob, self.backoff, self.line = array("i"), array("f"), array("f"), array("i")

    def ngrams(self) -> Ngrams:
        return Ngrams(
            np.frombuffer(self.words, dtype=np.int32).reshape(-1, self.order),
            np.frombuffer(self.log_prob, dtype=np.float32) * np.float32(_LN10),
            np.frombuffer(self.backoff, dtype=np.float32) * np.float32(_LN10),
            np.frombuffer(self.line, dtype=np.int32),
        )


def read_arpa(path: str | Path, words: Mapping[str, int], *, skip_unknown: bool = False) -> Arpa:
    """The model of an ARPA file (gzip allowed), its words numbered by ``words``.

    A word without an id raises ``GraphError`` naming file and line; with ``skip_unknown`` the n-grams that contain one
    are left out and counted. ``<unk>`` without an id is always left out: toolkits write it into every model, and it is
    no word. Also raised where the file ends early, or counts and sections differ.
    """
    path = Path(path)
    begin = max(words.values(), default=0) + 1
    ids = {**words, "<s>": begin, "</s>": begin + 1}
    lines = numbered_fields(path)
    counts = _read_counts(path, lines)
    orders, skipped = [], 0
    for order, count in enumerate(counts, start=1):
        columns = _Columns(order)
        missing = _read_section(path, lines, columns, ids, skip_unknown, last=order == len(counts))
        if missing + len(columns.line) != count:
            raise GraphError(f"{path}: {missing + len(columns.line)} {order}-grams, its header says {count}.")
        skipped += missing
        orders.append(columns.ngrams())
    return Arpa(path, tuple(orders), begin, begin + 1, skipped)


def _read_counts(path: Path, lines: Iterator[tuple[int, list[str]]]) -> list[int]:
    """Counts by order; stops behind the title of the first section."""
    counts: list[int] = []
    inside = False
    for line, fields in lines:
        if fields == ["\\data\\"]:
            inside = True
        elif inside and fields == ["\\1-grams:"] and counts:
            return counts
        elif inside:
            match = _COUNT.fullmatch("".join(fields[1:])) if fields[0] == "ngram" else None
            if match is None or int(match[1]) != len(counts) + 1:
                raise GraphError(f"{path}, line {line}: expected 'ngram {len(counts) + 1}=COUNT'.", line)
            counts.append(int(match[2]))
    raise GraphError(f"{path} has no \\data\\ with counts and \\1-grams:, it is no language model in ARPA form.")


def _read_section(
    path: Path,
    lines: Iterator[tuple[int, list[str]]],
    columns: _Columns,
    ids: Mapping[str, int],
    skip_unknown: bool,
    last: bool,
) -> int:
    """Read up to the title of the next section; the n-grams left out."""
    order, missing = columns.order, 0
    closing = "\\end\\" if last else f"\\{order + 1}-grams:"
    for line, fields in lines:
        if fields[0] == closing:
            return missing
        if len(fields) not in (order + 1, order + 2):
            raise GraphError(
                f"{path}, line {line}: expected a probability, {order} words and at most a back-off weight, or "
                f"{closing}; got {' '.join(fields)!r}.",
                line,
            )
        try:
            numbers = float(fields[0]), float(fields[order + 1]) if len(fields) == order + 2 else 0.0
            if not all(map(math.isfinite, numbers)):
                raise ValueError
        except ValueError:
            raise GraphError(f"{path}, line {line}: {fields[0]} or {fields[-1]} is not a number.", line) from None
        try:
            row = [ids[word] for word in fields[1 : order + 1]]
        except KeyError as error:
            if not (skip_unknown or error.args[0] in _UNKNOWN):
                raise _unknown(path, line, error.args[0], ids) from None
            missing += 1
            continue
        columns.words.extend(row)
        columns.log_prob.append(numbers[0])
        columns.backoff.append(numbers[1])
        columns.line.append(line)
    raise GraphError(f"{path} ends before {closing}, it is incomplete.")


def _unknown(path: Path, line: int, word: str, ids: Mapping[str, int]) -> GraphError:
    return GraphError(
        f"{path}, line {line}: {word!r} has no pronunciation in the lexicon.{did_you_mean(word, ids)} Add it there, or "
        "leave out the n-grams of such words with --skip-unknown.",
        line,
    )
