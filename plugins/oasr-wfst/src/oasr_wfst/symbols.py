"""A table of symbols: id -> text, kept as bytes so that a million words cost no Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from oasr_wfst.errors import GraphError
from oasr_wfst.text_lines import numbered_fields


class SymbolTable(Sequence[str]):
    """Texts by id, decoded one at a time when asked for; ids without a text give ``""``.

    ``begin`` int64 ``(size + 1,)`` are byte offsets into ``text`` uint8, UTF-8. Both may be mapped from a file.
    """

    __slots__ = ("begin", "text")

    def __init__(self, begin: npt.NDArray[np.int64], text: npt.NDArray[np.uint8]) -> None:
        self.begin = begin
        self.text = text

    @classmethod
    def of(cls, symbols: Iterable[str]) -> SymbolTable:
        """The table of ``symbols``, numbered from 0."""
        encoded = [symbol.encode("utf-8") for symbol in symbols]
        begin = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(each) for each in encoded], out=begin[1:])
        return cls(begin, np.frombuffer(b"".join(encoded), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.begin) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"symbol {index} of {len(self)}")
        return self.text[self.begin[position] : self.begin[position + 1]].tobytes().decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolTable):
            return np.array_equal(self.begin, other.begin) and np.array_equal(self.text, other.text)
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SymbolTable({len(self)} symbols)"


def read_symbols(path: str | Path) -> SymbolTable:
    """The table of a ``words.txt`` or ``tokens.txt``: a text and its id on each line, in any order.

    Raises ``GraphError`` naming the line where a line has no id or an id occurs twice, and where the ids are so far
    apart that the file cannot be a table of symbols.
    """
    path = Path(path)
    texts: dict[int, str] = {}
    for line, fields in numbered_fields(path):
        if len(fields) != 2 or not fields[1].isdecimal():
            raise GraphError(f"{path}, line {line}: expected a symbol and its id, got {' '.join(fields)!r}.", line)
        number = int(fields[1])
        if number in texts:
            raise GraphError(f"{path}, line {line}: id {number} is {texts[number]!r} already.", line)
        texts[number] = fields[0]
    size = max(texts, default=-1) + 1
    if size > 10 * len(texts) + 1000:
        raise GraphError(f"{path}: the largest id is {size - 1}, but there are only {len(texts)} symbols.")
    return SymbolTable.of(texts.get(number, "") for number in range(size))
