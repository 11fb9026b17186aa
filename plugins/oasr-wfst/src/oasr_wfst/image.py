"""Graph images: one file that is mapped read-only, so that processes share the memory of a graph.

A header of 512 bytes, then the arrays of :class:`~oasr_wfst.graph.Graph`, each at a multiple of 64 bytes, all numbers
little-endian. The header holds magic and version, sizes, the place of every array, a checksum of what follows it and,
in its last 4 bytes, one of itself.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from importlib_metadata import version

from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, Graph
from oasr_wfst.symbols import SymbolTable

#: The first bytes of every image.
MAGIC: Final = b"OASRWFST"
VERSION: Final = 1
HEADER_SIZE: Final = 512
_ALIGNMENT: Final = 64
#: Bytes that are read at a time for the checksum.
_BLOCK: Final = 1 << 24
#: magic, version, max_label, has_epsilons, payload checksum, file size; then (offset, bytes) of each section.
_PREAMBLE: Final = struct.Struct("<8sIiIIQ")
_SECTION: Final = struct.Struct("<QQ")
_CHECKSUM: Final = struct.Struct("<I")
_AGAIN: Final = "The file is incomplete or damaged: copy or build it again."
_DTYPES: Final[dict[str, str]] = {
    "arc_begin": "<i8", "dest": "<i4", "label": "<i4", "score": "<f4", "word_begin": "<i8", "words": "<i4",
    "epsilon_count": "<i4", "symbol_begin": "<i8", "symbol_text": "|u1", "token_begin": "<i8", "token_text": "|u1",
    "note": "|u1",
}  # fmt: skip


def write_image(graph: Graph, path: str | Path) -> int:
    """Write ``graph`` and return the bytes written. The file appears under its name only when it is complete."""
    path = Path(path)
    sections: dict[str, npt.NDArray[Any]] = {
        "arc_begin": graph.arc_begin,
        "dest": graph.dest,
        "label": graph.label,
        "score": graph.score,
        "word_begin": graph.word_begin,
        "words": graph.words,
        "epsilon_count": graph.epsilon_count,
        "symbol_begin": graph.symbols.begin,
        "symbol_text": graph.symbols.text,
        "token_begin": graph.tokens.begin,
        "token_text": graph.tokens.text,
        "note": np.frombuffer(_signed(graph.note).encode("utf-8"), dtype=np.uint8),
    }
    places = {}
    at = HEADER_SIZE
    for name, array in sections.items():
        places[name] = (at, array.nbytes)
        at += array.nbytes + -array.nbytes % _ALIGNMENT
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(bytes(HEADER_SIZE))
            checksum = 0
            for name, array in sections.items():
                # One contiguous piece, also where the array is mapped from another image.
                piece = np.ascontiguousarray(array, dtype=_DTYPES[name]).view(np.uint8).data
                padding = bytes(-len(piece) % _ALIGNMENT)
                file.write(piece)
                file.write(padding)
                checksum = zlib.crc32(padding, zlib.crc32(piece, checksum))
            file.seek(0)
            file.write(_pack_header(graph, places, checksum, at))
        partial.replace(path)
    except OSError as error:
        raise GraphError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return at


def open_image(path: str | Path, *, verify: bool = True) -> Graph:
    """The graph of an image, its arrays mapped read-only from the file.

    With ``verify`` everything is read once: the checksum, and what ``Graph.checked`` checks, so that a damaged graph is
    refused before a decoder follows it. Without, only the header is checked (its own checksum, version, sizes, places
    of the arrays, size of the file): for processes that open an image which another has verified. Raises
    ``GraphError`` with the byte offset and the reason.
    """
    path = Path(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise GraphError(f"{path} cannot be read: {error}") from error
    header = bytes(data[:HEADER_SIZE])
    _check_header(path, header)
    _, _, max_label, has_epsilons, checksum, size = _PREAMBLE.unpack_from(header)
    if size != len(data):
        raise GraphError(f"{path} has {len(data)} bytes, its header says {size}. {_AGAIN}", len(data))
    sections = _map_sections(path, header, data)
    graph = Graph(
        arc_begin=sections["arc_begin"],
        dest=sections["dest"],
        label=sections["label"],
        score=sections["score"],
        word_begin=sections["word_begin"],
        words=sections["words"],
        epsilon_count=sections["epsilon_count"],
        max_label=max_label,
        has_epsilons=bool(has_epsilons),
        symbols=_symbols(path, header, sections, "symbol"),
        tokens=_symbols(path, header, sections, "token"),
        note=sections["note"].tobytes().decode("utf-8", errors="replace"),
    )
    _check_sizes(path, header, graph)
    if verify:
        _check_payload(path, data, checksum)
        _check_graph(path, header, graph)
    return graph


def _signed(note: str) -> str:
    """The note with the release that wrote the first image of the graph."""
    return note if "oasr-wfst" in note else f"{note} (oasr-wfst {version('oasr-wfst')})".lstrip()


def _pack_header(graph: Graph, places: dict[str, tuple[int, int]], checksum: int, size: int) -> bytes:
    start = _PREAMBLE.pack(MAGIC, VERSION, graph.max_label, graph.has_epsilons, checksum, size)
    header = (start + b"".join(_SECTION.pack(*places[name]) for name in _DTYPES)).ljust(HEADER_SIZE - 4, b"\0")
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _check_header(path: Path, header: bytes) -> None:
    if header[: len(MAGIC)] != MAGIC:
        raise GraphError(f"{path}, byte 0: not a graph image, it begins with {header[: len(MAGIC)]!r}.", 0)
    if len(header) < HEADER_SIZE:
        raise GraphError(f"{path} ends inside of its header, at byte {len(header)}. {_AGAIN}", len(header))
    found = _PREAMBLE.unpack_from(header)[1]
    if found != VERSION:
        raise GraphError(
            f"{path}, byte 8: image version {found}, this release reads {VERSION}. Write it again with 'oasr wfst "
            "build --from' and the graph that it was made of.",
            8,
        )
    if _CHECKSUM.unpack_from(header, HEADER_SIZE - 4)[0] != zlib.crc32(header[: HEADER_SIZE - 4]):
        raise GraphError(f"{path}, bytes 0 to {HEADER_SIZE}: the header does not have its checksum. {_AGAIN}", 0)


def _place(header: bytes, name: str) -> tuple[int, int]:
    offset, size = _SECTION.unpack_from(header, _PREAMBLE.size + list(_DTYPES).index(name) * _SECTION.size)
    return int(offset), int(size)


def _map_sections(path: Path, header: bytes, data: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    sections = {}
    for name, dtype in _DTYPES.items():
        offset, size = _place(header, name)
        if offset % _ALIGNMENT or not HEADER_SIZE <= offset <= len(data) - size or size % np.dtype(dtype).itemsize:
            raise GraphError(f"{path}, byte {offset}: no place for {size} bytes of {name}.", offset)
        sections[name] = data[offset : offset + size].view(dtype)
    return sections


def _symbols(path: Path, header: bytes, sections: dict[str, npt.NDArray[Any]], name: str) -> SymbolTable:
    begin, text = sections[f"{name}_begin"], sections[f"{name}_text"]
    if len(begin) < 1 or begin[0] != 0 or begin[-1] != len(text):
        offset = _place(header, f"{name}_begin")[0]
        raise GraphError(f"{path}, byte {offset}: the offsets of the {name}s do not fit their text.", offset)
    return SymbolTable(begin, text)


def _check_sizes(path: Path, header: bytes, graph: Graph) -> None:
    """What a decoder relies on and the header alone can show: arrays that belong together have sizes that fit."""
    arcs = graph.num_arcs
    for name, size, expected in (
        ("label", len(graph.label), arcs),
        ("score", len(graph.score), arcs),
        ("word_begin", len(graph.word_begin), arcs + 1),
        ("epsilon_count", len(graph.epsilon_count), graph.num_states),
    ):
        if size != expected:
            offset = _place(header, name)[0]
            raise GraphError(f"{path}, byte {offset}: {name} has {size} elements, expected {expected}.", offset)


def _check_payload(path: Path, data: npt.NDArray[np.uint8], expected: int) -> None:
    checksum = 0
    for begin in range(HEADER_SIZE, len(data), _BLOCK):
        checksum = zlib.crc32(data[begin : begin + _BLOCK].data, checksum)
    if checksum != expected:
        raise GraphError(
            f"{path}, from byte {HEADER_SIZE}: the arrays do not have their checksum ({checksum:08x}, expected "
            f"{expected:08x}). {_AGAIN}",
            HEADER_SIZE,
        )


def _check_graph(path: Path, header: bytes, graph: Graph) -> None:
    """Check the arrays themselves; errors give the byte of the element at fault."""
    for name, table in (("symbol", graph.symbols), ("token", graph.tokens)):
        if np.any(table.begin[1:] < table.begin[:-1]):
            offset = _place(header, f"{name}_begin")[0]
            raise GraphError(f"{path}, byte {offset}: the offsets of the {name}s decrease.", offset)
    try:
        found = Graph.checked(
            graph.arc_begin, graph.dest, graph.label, graph.score, graph.word_begin, graph.words, symbols=graph.symbols
        )
    except GraphError as error:
        if error.array is None or error.offset is None:
            raise GraphError(f"{path}: {error}") from error
        offset = _place(header, error.array)[0] + error.offset * np.dtype(_DTYPES[error.array]).itemsize
        raise GraphError(f"{path}, byte {offset}: {error}", offset, error.array) from error
    if (graph.max_label, graph.has_epsilons) != (found.max_label, found.has_epsilons):
        raise GraphError(f"{path}: largest label and epsilons are not what the header says.", 0)
    if not np.array_equal(graph.epsilon_count, found.epsilon_count):
        state = int(np.flatnonzero(graph.epsilon_count != found.epsilon_count)[0])
        offset = _place(header, "epsilon_count")[0] + 4 * state
        raise GraphError(f"{path}, byte {offset}: state {state} does not have this many {EPSILON} arcs.", offset)
