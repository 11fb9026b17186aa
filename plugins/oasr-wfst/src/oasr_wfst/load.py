"""Loads a decoding graph from any file that holds one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from oasr_wfst import image, openfst_format
from oasr_wfst.errors import GraphError
from oasr_wfst.fst import EPSILON_SYMBOLS, Fst, graph_from_fst
from oasr_wfst.graph import Graph
from oasr_wfst.image import open_image
from oasr_wfst.k2_format import read_k2
from oasr_wfst.openfst_format import read_openfst
from oasr_wfst.openfst_text import LabelReader, names_labels, read_openfst_text
from oasr_wfst.symbols import SymbolTable, read_symbols

#: Column = input label - offset: Kaldi, WeNet and icefall number OpenFst input labels from 1, as 0 is epsilon.
DEFAULT_LABEL_OFFSET: Final = 1

_NO_SYMBOLS: Final = SymbolTable.of(())
_LFS: Final = b"version https://git-lfs"


def graph_kind(path: str | Path) -> str:
    """What a file holds by its first bytes: ``image``, ``k2``, ``openfst`` or ``openfst text``."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(1024)
    except OSError as error:
        raise GraphError(f"{path} cannot be read: {error.strerror}. Expected the file of a decoding graph.") from error
    if not start:
        raise GraphError(f"{path} is empty. Expected the file of a decoding graph.", 0)
    if start.startswith(image.MAGIC):
        return "image"
    if start.startswith(openfst_format.MAGIC):
        return "openfst"
    if start.startswith(b"PK\x03\x04"):
        return "k2"
    if start.startswith(_LFS):
        raise GraphError(f"{path} is a Git LFS pointer, not the graph itself: run 'git lfs pull'.", 0)
    if start.startswith(b"\x80"):
        raise GraphError(f"{path} is in the format of torch before 1.6; load it and save it again with torch.save.", 0)
    first = start.split(b"\n", 1)[0].split()
    if start.startswith(b"\x1f\x8b") or (first and len(first) <= 5 and first[0].isdigit()):
        return "openfst text"
    raise GraphError(
        f"{path} is none of: graph image, k2 HLG.pt (torch.save), OpenFst binary, OpenFst text. It begins with "
        f"{start[:16]!r}.",
        0,
    )


def load_graph(
    path: str | Path,
    *,
    words: str | Path | None = None,
    tokens: str | Path | None = None,
    label_offset: int | None = None,
    verify: bool = True,
) -> Graph:
    """The decoding graph of a file: an image (mapped), k2's ``HLG.pt``, or an OpenFst transducer, binary or text.

    ``words`` and ``tokens`` are symbol tables (``words.txt``, ``tokens.txt``); those of the file itself are used where
    they are ``None``. ``label_offset`` belongs to OpenFst files: column = input label - offset, default 1. A table of
    tokens may be the model's, or that of the transducer, which begins with ``<eps>``. An OpenFst text may name labels
    by symbol: it does so for the inputs (or outputs) if one of them is no whole number. ``verify=False`` leaves out the
    full check of an image, see ``open_image``. Raises ``GraphError``.
    """
    path = Path(path)
    kind = graph_kind(path)
    word_table = read_symbols(words) if words is not None else None
    token_table = read_symbols(tokens) if tokens is not None else None
    if kind in ("image", "k2") and label_offset not in (None, 0):
        raise GraphError(f"{path}: label_offset={label_offset} belongs to OpenFst files; labels here are columns.")
    offset = DEFAULT_LABEL_OFFSET if label_offset is None else label_offset
    if kind == "image":
        return _with_symbols(open_image(path, verify=verify), word_table, token_table)
    if kind == "k2":
        columns = _by_column(token_table, DEFAULT_LABEL_OFFSET)
        return read_k2(path, symbols=word_table or _NO_SYMBOLS, tokens=columns, note=f"k2 {path.name}")
    fst = read_openfst(path) if kind == "openfst" else _read_text(path, word_table, token_table, offset)
    symbols = fst.output_symbols if word_table is None else word_table
    columns = _by_column(fst.input_symbols if token_table is None else token_table, offset)
    try:
        return graph_from_fst(fst, symbols=symbols, tokens=columns, label_offset=offset, note=f"OpenFst {path.name}")
    except GraphError as error:
        raise GraphError(f"{path}: {error}", error.offset, error.array) from error


def _with_symbols(graph: Graph, words: SymbolTable | None, tokens: SymbolTable | None) -> Graph:
    """The graph of an image with other tables; they are checked as those of the image were."""
    if words is None and tokens is None:
        return graph
    return Graph.checked(
        graph.arc_begin, graph.dest, graph.label, graph.score, graph.word_begin, graph.words,
        symbols=graph.symbols if words is None else words,
        tokens=graph.tokens if tokens is None else _by_column(tokens, DEFAULT_LABEL_OFFSET),
        note=graph.note,
    )  # fmt: skip


def _by_column(tokens: SymbolTable | None, offset: int) -> SymbolTable:
    """Tokens by column: a table that begins with an epsilon numbers a transducer's labels."""
    if tokens is None:
        return _NO_SYMBOLS
    if len(tokens) and tokens[0] in EPSILON_SYMBOLS:
        return SymbolTable.of(tokens[offset:])
    return tokens


def _read_text(path: Path, words: SymbolTable | None, tokens: SymbolTable | None, offset: int) -> Fst:
    named = names_labels(path)
    sides = (("tokens", named[0], tokens), ("words", named[1], words))
    missing = " and that of ".join(name for name, by_symbol, table in sides if by_symbol and table is None)
    if missing:
        raise GraphError(f"{path} names its labels by symbol; their ids are needed: give the table of {missing}.")
    label = _reader(tokens, 0 if tokens and tokens[0] in EPSILON_SYMBOLS else offset) if named[0] else int
    return read_openfst_text(path, label, _reader(words, 0) if named[1] else int)[0]


def _reader(table: SymbolTable | None, offset: int) -> LabelReader:
    """Reads the symbols of ``table`` as their ids raised by ``offset``, and epsilons as 0."""
    ids = {symbol: number + offset for number, symbol in enumerate(table or ()) if symbol}
    ids.update(dict.fromkeys(EPSILON_SYMBOLS[:2], 0))
    return ids.__getitem__
