"""Whether a graph is refused that was built for another model's tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from oasr_core.errors import ConfigError
from oasr_core.testing.decoding import ByteTokenizer
from oasr_wfst.fit import check_tokens
from oasr_wfst.symbols import SymbolTable, read_symbols

DATA = Path(__file__).parent / "data"
PATH = Path("g.img")


class TableTokenizer(ByteTokenizer):
    """Says the symbols of a list; ``<...>`` are special."""

    def __init__(self, symbols):
        self.symbols = symbols

    @property
    def vocab_size(self):
        return len(self.symbols)

    @property
    def special_ids(self):
        return frozenset(i for i, symbol in enumerate(self.symbols) if symbol.startswith("<"))

    def token_pieces(self, ids):
        return ["" if i in self.special_ids else self.symbols[i].replace("▁", " ").lstrip() for i in ids]


@pytest.fixture
def tokens():
    return list(read_symbols(DATA / "tokens.txt"))


def test_the_same_tokens_fit(tokens, caplog):
    check_tokens(PATH, SymbolTable.of(tokens), TableTokenizer(tokens))
    check_tokens(PATH, SymbolTable.of(tokens), TableTokenizer([*tokens, "more"]))
    check_tokens(PATH, SymbolTable.of(tokens[:40]), TableTokenizer(tokens))
    assert not caplog.records


def test_a_graph_without_names_is_not_judged(tokens):
    check_tokens(PATH, SymbolTable.of(()), TableTokenizer(tokens))


def test_ways_to_mark_the_edges_of_words_do_not_matter():
    check_tokens(PATH, SymbolTable.of(["<blk>", "he@@", "llo", "▁"]), TableTokenizer(["<blk>", "he", "llo", "|"]))


@pytest.mark.parametrize("change", [lambda t: [t[0], *t[2:], t[1]], lambda t: [t[0], *reversed(t[1:])]])
def test_tokens_of_another_model_are_refused(tokens, change):
    with pytest.raises(ConfigError, match=r"^g\.img was built for other tokens: column \d+ is .* in the model; \d+ of"):
        check_tokens(PATH, SymbolTable.of(change(tokens)), TableTokenizer(tokens))


def test_a_few_other_tokens_are_warned_about(tokens, caplog):
    with caplog.at_level(logging.WARNING, logger="oasr_wfst.fit"):
        check_tokens(PATH, SymbolTable.of([*tokens[:-1], "XYZ"]), TableTokenizer(tokens))
    assert "column 44 is 'XYZ' in the graph" in caplog.text


def test_large_tables_are_sampled():
    symbols = ["<blk>", *map(str, range(5000))]
    check_tokens(PATH, SymbolTable.of(symbols), TableTokenizer(symbols))
    with pytest.raises(ConfigError, match=r"\d+ of (4|5)\d\d tokens"):
        check_tokens(PATH, SymbolTable.of(["<blk>", "x", *symbols[1:]]), TableTokenizer(symbols))
