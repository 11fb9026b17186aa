"""Builds decoding graphs: lexicon and grammar composed, determinized, minimized, then the CTC topology."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oasr_wfst.arpa import read_arpa
from oasr_wfst.errors import GraphError
from oasr_wfst.fst import EPSILON_SYMBOLS, Fst
from oasr_wfst.grammar import grammar_from_arpa, read_grammar
from oasr_wfst.graph import Graph
from oasr_wfst.lexicon import Lexicon, read_lexicon
from oasr_wfst.openfst_format import read_openfst, write_openfst
from oasr_wfst.symbols import SymbolTable, read_symbols
from oasr_wfst.topology import compose_ctc

#: Costs are rounded to multiples of this where states are compared, as Kaldi does: 0.001 for each arc at most.
WEIGHT_STEP = 1.0 / 1024


@dataclass(frozen=True)
class Stage:
    """One finished step of building."""

    name: str
    states: int
    arcs: int
    seconds: float
    #: what else there is to say, or empty
    remark: str = ""


#: Told of every finished step.
Report = Callable[[Stage], None]


def build_graph(
    tokens: str | Path,
    lexicon: str | Path,
    *,
    arpa: str | Path | None = None,
    grammar: str | Path | None = None,
    words: str | Path | None = None,
    repeat: bool = False,
    skip_unknown: bool = False,
    remove_epsilons: bool = False,
    report: Report = lambda stage: None,
) -> Graph:
    """The decoding graph of a lexicon and a grammar over the tokens of a model.

    Exactly one of ``arpa`` (a back-off model) and ``grammar`` (sentences or a transducer, see ``read_grammar``) is
    given. ``words`` fixes the word ids. ``remove_epsilons`` takes out the epsilon arcs that back-off and
    disambiguation leave: fewer steps for a decoder, but many more arcs for a large back-off model. Raises
    ``GraphError`` naming file and line for words and tokens that do not fit together.
    """
    grammar_path = arpa if grammar is None else grammar
    if grammar_path is None or None not in (arpa, grammar):
        raise GraphError("a graph is built of a lexicon and either an ARPA model or a grammar; give exactly one.")
    clock = _Clock(report)
    pronunciations = read_lexicon(lexicon, _columns(tokens), read_symbols(words) if words is not None else None)
    spoken = pronunciations.transducer()
    clock.done("lexicon", spoken.num_states, spoken.num_arcs, f"{len(pronunciations.words)} pronunciations")
    if arpa is not None:
        model = read_arpa(arpa, pronunciations.word_ids(), skip_unknown=skip_unknown)
        sentences = grammar_from_arpa(model, pronunciations.backoff_word)
        remark = f"{model.skipped} n-grams skipped" if model.skipped else ""
        del model
    else:
        sentences, remark = read_grammar(grammar_path, pronunciations, repeat=repeat), ""
    clock.done("grammar", sentences.num_states, sentences.num_arcs, remark)
    composed = _lexicon_and_grammar(spoken, sentences, pronunciations, remove_epsilons, clock)
    del spoken, sentences
    sources = " + ".join(Path(each).name for each in (tokens, lexicon, grammar_path))
    graph = compose_ctc(composed, symbols=pronunciations.symbols, tokens=pronunciations.tokens, note=f"ctc: {sources}")
    clock.done("ctc topology", graph.num_states, graph.num_arcs)
    return graph


class _Clock:
    """Reports each step with the time since the one before."""

    def __init__(self, report: Report) -> None:
        self._report, self._since = report, time.perf_counter()

    def done(self, name: str, states: int, arcs: int, remark: str = "") -> None:
        now = time.perf_counter()
        self._report(Stage(name, states, arcs, now - self._since, remark))
        self._since = now


def _columns(path: str | Path) -> SymbolTable:
    """The model's tokens by column, from its own table or from that of a transducer (``<eps>`` first)."""
    table = read_symbols(path)
    return SymbolTable.of(table[1:]) if len(table) and table[0] in EPSILON_SYMBOLS else table


def _lexicon_and_grammar(spoken: Fst, sentences: Fst, lexicon: Lexicon, remove_epsilons: bool, clock: _Clock) -> Fst:
    """Lexicon and grammar as one transducer: deterministic, minimal, disambiguation labels turned into epsilons."""
    import kaldifst

    with tempfile.TemporaryDirectory(prefix="oasr-wfst-") as folder:
        exchange = Path(folder) / "exchange.fst"
        left, right = _to_kaldifst(spoken, exchange), _to_kaldifst(sentences, exchange)
        kaldifst.arcsort(left, "olabel")
        kaldifst.arcsort(right, "ilabel")
        machine = kaldifst.compose(left, right)
        del left, right
        if machine.num_states == 0:
            raise GraphError("no sentence of the grammar can be spelled with the lexicon: nothing to decode.")
        clock.done("composition", *_size(machine))
        kaldifst.determinize_star(machine, delta=WEIGHT_STEP)
        clock.done("determinization", *_size(machine))
        kaldifst.minimize_encoded(machine, delta=WEIGHT_STEP)
        clock.done("minimization", *_size(machine))
        made = _without_disambiguation(_from_kaldifst(machine, exchange), lexicon.backoff_label)
        del machine
        if remove_epsilons:
            machine = _to_kaldifst(made, exchange)
            kaldifst.rmepsilon(machine)
            clock.done("epsilon removal", *_size(machine))
            made = _from_kaldifst(machine, exchange)
    return made.start_first()


def _to_kaldifst(fst: Fst, exchange: Path) -> Any:
    """Through a file: adding arcs one by one would take far longer than everything else."""
    import kaldifst

    write_openfst(fst, exchange)
    return kaldifst.StdVectorFst.read(str(exchange))


def _from_kaldifst(machine: Any, exchange: Path) -> Fst:
    if not machine.write(str(exchange)):
        raise GraphError(f"{exchange} cannot be written: is the disk full? TMPDIR names another folder for it.")
    return read_openfst(exchange)


def _size(machine: Any) -> tuple[int, int]:
    return machine.num_states, sum(map(machine.num_arcs, range(machine.num_states)))


def _without_disambiguation(fst: Fst, first: int) -> Fst:
    return replace(fst, ilabel=np.where(fst.ilabel >= first, 0, fst.ilabel))
