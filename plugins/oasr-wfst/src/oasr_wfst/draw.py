"""Small graphs as pictures: DOT text, and what the program ``dot`` makes of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, FINAL, Graph

#: Larger pictures cannot be read, and ``dot`` takes minutes for them.
MAX_ARCS: Final = 1000
_PICTURES: Final = (".svg", ".png", ".pdf")


def draw_graph(graph: Graph, path: str | Path, *, max_arcs: int = MAX_ARCS) -> None:
    """Write ``path``: DOT text for ``*.dot``, a picture for ``*.svg``, ``*.png`` and ``*.pdf`` (needs Graphviz).

    Raises ``GraphError`` for graphs of more than ``max_arcs`` arcs, other names, and where the program ``dot`` is
    missing or fails.
    """
    path = Path(path)
    if path.suffix not in (".dot", *_PICTURES):
        raise GraphError(
            f"{path}: pictures are written as .dot, {', '.join(_PICTURES)}; got {path.suffix or 'no suffix'}."
        )
    program = shutil.which("dot")
    if path.suffix != ".dot" and program is None:
        raise GraphError(
            f"{path}: the program 'dot' that draws {path.suffix} is not installed. Install Graphviz, or write "
            f"{path.with_suffix('.dot').name} and draw it elsewhere."
        )
    if graph.num_arcs > max_arcs:
        raise GraphError(
            f"the graph has {graph.num_arcs} arcs, pictures are drawn up to {max_arcs}: nobody could read more. Draw a "
            "smaller grammar, or raise --max-arcs."
        )
    text = "\n".join(dot_lines(graph)) + "\n"
    try:
        if program is None or path.suffix == ".dot":
            path.write_text(text, encoding="utf-8")
            return
        command = [program, f"-T{path.suffix[1:]}", "-o", str(path)]
        subprocess.run(command, input=text.encode("utf-8"), check=True, capture_output=True)
    except OSError as error:
        raise GraphError(f"{path} cannot be written: {error}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", errors="replace").strip()
        raise GraphError(f"{path}: 'dot' failed: {reason}") from error


def dot_lines(graph: Graph) -> Iterator[str]:
    """The graph in DOT: circles and arrows, each with ``token:words/score``; the super-final state is double."""
    yield "digraph graph_of_words {"
    yield "  rankdir = LR;"
    yield "  node [shape = circle];"
    yield "  0 [style = bold];"
    yield f"  {graph.num_states - 1} [shape = doublecircle];"
    sources = np.repeat(np.arange(graph.num_states), np.diff(graph.arc_begin))
    for arc in range(graph.num_arcs):
        yield f"  {sources[arc]} -> {graph.dest[arc]} [label = {_quoted(_arc_text(graph, arc))}];"
    yield "}"


def _arc_text(graph: Graph, arc: int) -> str:
    label = int(graph.label[arc])
    if label in (EPSILON, FINAL):
        text = "<eps>" if label == EPSILON else "<final>"
    else:
        text = (graph.tokens[label] if label < len(graph.tokens) else "") or str(label)
    words = graph.words[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist()
    if words:
        text += ":" + " ".join(
            (graph.symbols[word] if word < len(graph.symbols) else "") or str(word) for word in words
        )
    return f"{text}/{graph.score[arc]:.4g}" if graph.score[arc] else text


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
