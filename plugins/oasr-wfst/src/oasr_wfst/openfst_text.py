"""OpenFst's text form of a transducer: one arc or final state on a line."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oasr_wfst.errors import GraphError
from oasr_wfst.fst import Fst
from oasr_wfst.text_lines import numbered_fields

#: Turns the text of a label into its number; ``KeyError`` where there is none.
LabelReader = Callable[[str], int]

_LARGEST_STATE = 2**31 - 2


class _Rows:
    """Columns that grow line by line."""

    def __init__(self) -> None:
        self.source, self.dest, self.line = array("q"), array("i"), array("q")
        self.ilabel, self.olabel, self.cost = array("i"), array("i"), array("f")


def read_openfst_text(
    path: str | Path, input_label: LabelReader = int, output_label: LabelReader = int, acceptor: bool | None = None
) -> tuple[Fst, npt.NDArray[np.int64]]:
    """The transducer of a text file, and the line (from 1) of each arc.

    Lines are ``source dest input output [cost]`` (of acceptors ``source dest label [cost]``, both labels the same) and
    ``state [cost]`` for final states; the first line's first state is the start. ``acceptor`` says which, ``None``
    finds out: three fields on a line occur in acceptors alone, five in transducers alone, and where every arc has four,
    it is an acceptor if a last field is a number and no whole one. Raises ``GraphError`` naming the line.
    """
    path = Path(path)
    as_acceptor = _is_acceptor(path) if acceptor is None else acceptor
    labels = 1 if as_acceptor else 2
    rows, finals, start = _Rows(), dict[int, float](), -1
    for line, fields in numbered_fields(path):
        try:
            if len(fields) <= 2:
                state = _state(fields[0])
                finals[state] = _cost(fields[1:])
            elif 2 + labels <= len(fields) <= 3 + labels:
                state = _state(fields[0])
                rows.source.append(state)
                rows.dest.append(_state(fields[1]))
                rows.ilabel.append(input_label(fields[2]))
                rows.olabel.append(rows.ilabel[-1] if as_acceptor else output_label(fields[3]))
                rows.cost.append(_cost(fields[2 + labels :]))
                rows.line.append(line)
            else:
                raise ValueError(f"{len(fields)} fields")
        except KeyError as error:
            raise GraphError(f"{path}, line {line}: no symbol {error.args[0]!r} in the table.", line) from None
        except (ValueError, OverflowError) as error:
            expected = "source dest label [cost]" if as_acceptor else "source dest input output [cost]"
            raise GraphError(
                f"{path}, line {line}: expected '{expected}' or 'state [cost]', got {' '.join(fields)!r} ({error}).",
                line,
            ) from None
        start = state if start < 0 else start
    if start < 0:
        raise GraphError(f"{path} has no arcs and no states.")
    _check_numbering(path, rows, finals)
    return _assemble(rows, finals, start), np.frombuffer(rows.line, dtype=np.int64)


def _check_numbering(path: Path, rows: _Rows, finals: dict[int, float]) -> None:
    """States are numbered without large gaps; one huge number would ask for memory that the file does not explain."""
    largest = max(max(rows.source, default=0), max(rows.dest, default=0), max(finals, default=0))
    if largest > 10 * (len(rows.source) + len(finals)) + 1000:
        raise GraphError(f"{path}: state {largest} occurs, but there are only {len(rows.source)} arcs.")


def _assemble(rows: _Rows, finals: dict[int, float], start: int) -> Fst:
    source, dest = np.frombuffer(rows.source, dtype=np.int64), np.frombuffer(rows.dest, dtype=np.int32)
    size = max(int(source.max(initial=0)), int(dest.max(initial=0)), max(finals, default=0), start) + 1
    final = np.full(size, np.inf, dtype=np.float32)
    final[list(finals)] = list(finals.values())
    return Fst(
        start=start,
        final=final,
        source=source,
        ilabel=np.frombuffer(rows.ilabel, dtype=np.int32),
        olabel=np.frombuffer(rows.olabel, dtype=np.int32),
        cost=np.frombuffer(rows.cost, dtype=np.float32),
        dest=dest,
    )


def names_labels(path: str | Path) -> tuple[bool, bool]:
    """Whether the file names input labels, and output labels, by symbol: some label is not a whole number.

    An acceptor has one label for both.
    """
    path = Path(path)
    last = 2 if _is_acceptor(path) else 3
    named = [False, False]
    for _, fields in numbered_fields(path):
        if len(fields) > last:
            named[0] = named[0] or not fields[2].isdecimal()
            named[1] = named[1] or not fields[last].isdecimal()
            if all(named):
                break
    return named[0], named[1]


def _is_acceptor(path: Path) -> bool:
    found = False
    for _, fields in numbered_fields(path):
        if len(fields) in (3, 5):
            return len(fields) == 3
        if len(fields) == 4 and not fields[3].isdecimal():
            if not _is_number(fields[3]):
                return False
            found = True
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _state(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_STATE:
        raise ValueError(f"{text!r} is no state")
    return int(text)


def _cost(fields: list[str]) -> float:
    cost = float(fields[0]) if fields else 0.0
    if math.isnan(cost) or cost == -math.inf:
        raise ValueError(f"{fields[0]} is no cost")
    return cost
