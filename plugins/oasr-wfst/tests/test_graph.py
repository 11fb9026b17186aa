"""The graph in memory: order of arcs, and everything that is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.errors import CheckpointError
from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, FINAL, Graph, graph_from_arcs
from oasr_wfst.symbols import SymbolTable, read_symbols

ARCS = [
    (1, 2, FINAL, -0.5, ()),
    (0, 0, 0, 0.0, ()),
    (0, 1, 3, -1.0, (2, 1)),
    (1, 0, EPSILON, -0.25, (1,)),
    (0, 1, 2, 0.0, ()),
]


def arrays(**changed):
    """The arrays of a small valid graph, some of them changed."""
    graph = graph_from_arcs(ARCS, 3)
    names = ("arc_begin", "dest", "label", "score", "word_begin", "words")
    return {**{name: getattr(graph, name).copy() for name in names}, **changed}


def test_arcs_are_sorted_by_source_and_keep_their_order_and_words():
    graph = graph_from_arcs(ARCS, 3, symbols=["<eps>", "a", "b"], note="small")
    assert graph.arc_begin.tolist() == [0, 3, 5, 5]
    assert graph.dest.tolist() == [0, 1, 1, 2, 0]
    assert graph.label.tolist() == [0, 3, 2, FINAL, EPSILON]
    assert graph.score.tolist() == [0.0, -1.0, 0.0, -0.5, -0.25]
    assert graph.word_begin.tolist() == [0, 0, 2, 2, 2, 3]
    assert graph.words.tolist() == [2, 1, 1]
    assert graph.epsilon_count.tolist() == [0, 1, 0]
    assert (graph.num_states, graph.num_arcs, graph.num_columns, graph.has_epsilons) == (3, 5, 4, True)
    assert repr(graph) == "Graph(3 states, 5 arcs, 4 columns, 'small')"
    with pytest.raises(ValueError, match="read-only"):
        graph.dest[0] = 1


@pytest.mark.parametrize(
    ("array", "index", "value", "reason"),
    [
        ("dest", 1, 3, r"dest\[1\] is 3; a state is 0 to 2"),
        ("dest", 4, -1, r"dest\[4\] is -1"),
        ("dest", 1, 2, r"label\[1\] is 3; the arcs into the last state 2, and only those, have the label -1"),
        ("label", 1, FINAL, r"label\[1\] is -1; the arcs into the last state"),
        ("label", 2, -3, r"label\[2\] is -3; labels are columns"),
        ("score", 0, np.nan, r"score\[0\] is nan; scores are finite"),
        ("score", 3, np.inf, r"score\[3\] is inf"),
        ("score", 3, -np.inf, r"score\[3\] is -inf"),
        ("words", 1, 0, r"words\[1\] is 0; word ids start at 1"),
        ("words", 0, 3, r"words\[0\] is 3; the table of words ends at 2"),
        ("arc_begin", 1, 6, r"arc_begin\[2\] is 5, less than the offset 6"),
        ("arc_begin", 0, 1, r"arc_begin\[0\] is 1, expected 0"),
        ("arc_begin", 3, 4, r"arc_begin\[3\] is 4, expected 5"),
        ("word_begin", 5, 2, r"word_begin\[5\] is 2, expected 3"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_place(array, index, value, reason):
    changed = arrays()
    changed[array][index] = value
    with pytest.raises(GraphError, match=reason) as caught:
        Graph.checked(**changed, symbols=["<eps>", "a", "b"])
    assert caught.value.offset is not None
    assert isinstance(caught.value, CheckpointError)


def test_arcs_out_of_the_last_state_are_refused():
    with pytest.raises(GraphError, match="arc 4 leaves the super-final state 2"):
        Graph.checked(**arrays(arc_begin=np.array([0, 3, 4, 5])))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arc_begin": np.array([0, 5])}, "got 1 states"),
        ({"score": np.zeros(4, np.float32)}, "score has 4 elements, expected 5"),
        ({"label": np.zeros(6, np.int32)}, "label has 6 elements, expected 5"),
        ({"word_begin": np.zeros(5, np.int64)}, "word_begin has 5 elements, expected 6"),
        ({"dest": np.zeros(5, np.int64)}, "int64"),
        ({"dest": np.zeros((5, 1), np.int32)}, "expected 1-D int32"),
        (
            {name: np.zeros(0, np.int32) for name in ("dest", "label")} | {"score": np.zeros(0, np.float32)},
            "without arcs",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, reason):
    with pytest.raises(GraphError, match=reason):
        Graph.checked(**arrays(**changed))


def test_sources_outside_of_the_states_are_refused():
    with pytest.raises(GraphError, match="arc 1 leaves state 7, but there are 3 states"):
        graph_from_arcs([(0, 2, FINAL, 0.0, ()), (7, 2, FINAL, 0.0, ())], 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.5])), max_size=9))
def test_epsilon_cycles_are_refused_just_where_an_arc_of_one_gains(epsilons):
    reach = np.zeros((5, 5), dtype=bool)
    for source, dest, _ in epsilons:
        reach[source, dest] = True
    for middle in range(5):
        reach |= reach[:, [middle]] & reach[[middle], :]
    gaining = any(score > 0 and (source == dest or reach[dest, source]) for source, dest, score in epsilons)
    arcs = [(source, dest, EPSILON, score, ()) for source, dest, score in epsilons]
    arcs.append((0, 5, FINAL, 0.0, ()))
    if gaining:
        with pytest.raises(GraphError, match="cycle of epsilon arcs"):
            graph_from_arcs(arcs, 6)
    else:
        assert graph_from_arcs(arcs, 6).epsilon_count.sum() == len(epsilons)


def test_a_long_chain_of_epsilons_is_checked_in_time():
    size = 20_000
    arcs = [(state, state + 1, EPSILON, 0.5, ()) for state in range(size)]
    assert graph_from_arcs([*arcs, (size, size + 1, FINAL, 0.0, ())], size + 2).has_epsilons


def test_symbols_are_a_sequence_of_texts():
    table = SymbolTable.of(["<eps>", "ja", "", "日本"])
    assert list(table) == ["<eps>", "ja", "", "日本"]
    assert (table[3], table[-1], table[1:3]) == ("日本", "日本", ["ja", ""])
    assert table == ["<eps>", "ja", "", "日本"]
    assert table != SymbolTable.of(["<eps>"])
    with pytest.raises(IndexError):
        table[4]


def test_a_table_of_symbols_is_read_in_any_order_with_holes(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("b 3\n<eps> 0\n\u3000\t1\n", encoding="utf-8")
    assert read_symbols(path) == ["<eps>", "\u3000", "", "b"]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a 0\nb\n", 2, "expected a symbol and its id, got 'b'"),
        ("a 0\nb x\n", 2, "expected a symbol"),
        ("a 0\n\nb 0\n", 3, "id 0 is 'a' already"),
        ("a 0\nb 123456789\n", None, "only 2 symbols"),
    ],
)
def test_damaged_tables_of_symbols_are_refused_with_the_line(tmp_path, text, line, reason):
    path = tmp_path / "words.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GraphError, match=reason) as caught:
        read_symbols(path)
    assert caught.value.offset == line


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"a 0\n\xff\xfe 1\n")
    with pytest.raises(GraphError, match="not UTF-8"):
        read_symbols(path)
    with pytest.raises(GraphError, match="cannot be read"):
        read_symbols(tmp_path / "missing.txt")
