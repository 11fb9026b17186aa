"""OpenFst's binary files: ``vector`` and ``const`` transducers with ``standard`` or ``log`` arcs."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from oasr_wfst.errors import GraphError
from oasr_wfst.fst import Fst
from oasr_wfst.symbols import SymbolTable

#: The first bytes of every OpenFst file.
MAGIC: Final = struct.pack("<i", 2125659606)
_SYMBOLS_MAGIC: Final = 2125658996
_HAS_INPUT_SYMBOLS, _HAS_OUTPUT_SYMBOLS, _ALIGNED = 1, 2, 4
#: kExpanded and kMutable: all that is claimed of files written here; OpenFst finds out the rest.
_PROPERTIES: Final = 3
_CONST_STATE: Final = np.dtype(
    [("final", "<f4"), ("begin", "<u4"), ("arcs", "<u4"), ("input_epsilons", "<u4"), ("output_epsilons", "<u4")]
)


class _Header(NamedTuple):
    kind: str
    version: int
    flags: int
    start: int
    num_states: int
    num_arcs: int


class _Reader:
    """A cursor over the bytes of one file; reading past the end raises ``GraphError``."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self.at + size > len(self.data):
            raise self.error(f"the file ends at byte {len(self.data)}, {size} more bytes are expected here")
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece

    def number(self, form: str) -> int:
        value: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return value

    def text(self) -> str:
        try:
            return bytes(self.take(self.number("i"))).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("a text that is not UTF-8") from None

    def error(self, reason: str) -> GraphError:
        return GraphError(f"{self.path}, byte {self.at}: {reason}.", self.at)


def read_openfst(path: str | Path) -> Fst:
    """The transducer of an OpenFst file; ``GraphError`` with the byte where it is damaged or of another kind."""
    path = Path(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").data
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise GraphError(f"{path} cannot be read: {error}") from error
    reader = _Reader(path, data)
    header = _read_header(reader)
    symbols = [
        _read_symbols(reader) if header.flags & flag else SymbolTable.of(())
        for flag in (_HAS_INPUT_SYMBOLS, _HAS_OUTPUT_SYMBOLS)
    ]
    read = _read_vector if header.kind == "vector" else _read_const
    final, counts, arcs = read(reader, header)
    if not 0 <= header.start < len(final):
        raise GraphError(f"{path}: the start state is {header.start} of {len(final)}; the transducer accepts nothing.")
    cost = np.ascontiguousarray(arcs[:, 2]).view(np.float32)
    return Fst(
        start=header.start,
        final=final,
        source=np.repeat(np.arange(len(final), dtype=np.int64), counts),
        ilabel=np.ascontiguousarray(arcs[:, 0]),
        olabel=np.ascontiguousarray(arcs[:, 1]),
        cost=cost,
        dest=np.ascontiguousarray(arcs[:, 3]),
        input_symbols=symbols[0],
        output_symbols=symbols[1],
    )


def write_openfst(fst: Fst, path: str | Path) -> None:
    """Write ``fst`` as a ``vector`` of ``standard`` arcs, without symbols; its arcs must be sorted by source."""
    counts = np.bincount(fst.source, minlength=fst.num_states)
    begin = np.concatenate([[0], np.cumsum(counts)])[:-1]
    positions = 3 * np.arange(fst.num_states) + 4 * begin
    words = np.empty(3 * fst.num_states + 4 * fst.num_arcs, dtype="<i4")
    is_arc = np.ones(len(words), dtype=np.bool_)
    words[positions] = fst.final.view(np.int32)
    words[positions + 1], words[positions + 2] = counts, 0  # a 64-bit number, its lower half first
    for offset in range(3):
        is_arc[positions + offset] = False
    words[is_arc] = np.stack([fst.ilabel, fst.olabel, fst.cost.view(np.int32), fst.dest], axis=1).ravel()
    header = struct.pack(
        "<i6si8siiQqqq",
        6, b"vector", 8, b"standard", 2, 0, _PROPERTIES, fst.start, fst.num_states, fst.num_arcs,
    )  # fmt: skip
    with Path(path).open("wb") as file:
        file.write(MAGIC + header)
        words.tofile(file)


def _read_header(reader: _Reader) -> _Header:
    if bytes(reader.take(4)) != MAGIC:
        reader.at = 0
        raise reader.error("not an OpenFst file, the magic number is another")
    kind, arc_type = reader.text(), reader.text()
    if kind not in ("vector", "const") or arc_type not in ("standard", "log"):
        raise reader.error(
            f"a {kind!r} transducer with {arc_type!r} arcs; 'vector' and 'const' with 'standard' or 'log' arcs are "
            "read. fstconvert and fstmap change them"
        )
    version, flags = reader.number("i"), reader.number("i")
    reader.number("Q")  # properties, which can be worked out
    return _Header(kind, version, flags, reader.number("q"), reader.number("q"), reader.number("q"))


def _read_symbols(reader: _Reader) -> SymbolTable:
    if reader.number("i") != _SYMBOLS_MAGIC:
        raise reader.error("a table of symbols is expected here, the magic number is another")
    reader.text()  # its name
    reader.number("q")  # the next free id
    size = reader.number("q")
    texts: dict[int, str] = {}
    for _ in range(size):
        text, number = reader.text(), reader.number("q")
        if not 0 <= number <= 10 * size + 1000:
            raise reader.error(f"symbol {text!r} has the id {number} in a table of {size}")
        texts[number] = text
    return SymbolTable.of(texts.get(number, "") for number in range(max(texts, default=-1) + 1))


_Parts = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int32]]


def _read_vector(reader: _Reader, header: _Header) -> _Parts:
    """Final costs, arcs of each state, and the arcs as ``(num_arcs, 4)``: input, output, cost bits, destination."""
    if (len(reader.data) - reader.at) % 4:
        raise reader.error("the states do not end at the end of the file")
    words = np.frombuffer(reader.data, dtype="<i4", offset=reader.at).copy()
    numbers = words.data  # its elements are Python numbers, faster to look at one by one
    positions = array("q")
    at, size = 0, len(words)
    while at < size and len(positions) != header.num_states:
        if at + 3 > size or numbers[at + 2] or not 0 <= numbers[at + 1] <= (size - at - 3) // 4:
            reader.at += 4 * at
            raise reader.error(f"state {len(positions)} has more arcs than the file has bytes for")
        positions.append(at)
        at += 3 + 4 * numbers[at + 1]
    if at != size or header.num_states not in (-1, len(positions)):
        reader.at += 4 * at
        raise reader.error(f"{len(positions)} states end here, expected {header.num_states} up to byte {4 * size}")
    heads = np.frombuffer(positions, dtype=np.int64)
    is_arc = np.ones(size, dtype=np.bool_)
    for offset in range(3):
        is_arc[heads + offset] = False
    return words[heads].view(np.float32), words[heads + 1].astype(np.int64), words[is_arc].reshape(-1, 4)


def _read_const(reader: _Reader, header: _Header) -> _Parts:
    """The same of a ``const`` file: all states, then all arcs."""
    aligned = bool(header.flags & _ALIGNED) or header.version == 1
    if header.num_states < 0 or header.num_arcs < 0:
        raise reader.error("the header gives no numbers of states and arcs")
    _align(reader, aligned)
    states = np.frombuffer(reader.take(header.num_states * _CONST_STATE.itemsize), dtype=_CONST_STATE)
    _align(reader, aligned)
    arcs = np.frombuffer(reader.take(header.num_arcs * 16), dtype="<i4").reshape(-1, 4)
    counts = states["arcs"].astype(np.int64)
    if counts.sum() != header.num_arcs or np.any(states["begin"] != np.cumsum(counts) - counts):
        raise reader.error(f"the states' arcs do not follow one another up to {header.num_arcs}")
    return np.ascontiguousarray(states["final"]), counts, arcs


def _align(reader: _Reader, aligned: bool) -> None:
    if aligned:
        reader.take(-reader.at % 16)
