"""The context graph: what phrases add, and that a broken match gives back exactly what it was given."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.context import ContextGraph

A, B, C, D = 1, 2, 3, 4


def walk(graph, tokens):
    """Score after each token, and after the end."""
    state, total, seen = graph.start, 0.0, []
    for token in tokens:
        state, delta = graph.advance(state, token)
        total += delta
        seen.append(total)
    return [*seen, total + graph.finalize(state)]


def test_a_match_is_paid_as_it_grows_and_kept_when_it_completes():
    graph = ContextGraph([([A, B, C], 2.0)])
    assert walk(graph, [A, B, C]) == [2.0, 4.0, 6.0, 6.0]
    assert walk(graph, [A, B, C, D]) == [2.0, 4.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize("boost", [1.5, -1.5, 0.1])
def test_a_broken_match_is_refunded_exactly(boost):
    graph = ContextGraph([([A, B, C], boost)])
    assert walk(graph, [A, B, D]) == [boost, 2 * boost, 0.0, 0.0]
    assert walk(graph, [D, A, B]) == [0.0, boost, 2 * boost, 0.0]
    assert walk(graph, [A, B]) == [boost, 2 * boost, 0.0]


def test_the_end_of_one_match_begins_another():
    graph = ContextGraph([([A, B, C], 1.0), ([B, D], 1.0)])
    assert walk(graph, [A, B, D]) == [1.0, 2.0, 2.0, 2.0]
    assert walk(graph, [A, A, B, C]) == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_completed_match_that_begins_another_awaits_it():
    graph = ContextGraph([([A, B], 1.0), ([B, C], 1.0)])
    assert walk(graph, [A, B, C]) == [1.0, 3.0, 4.0, 4.0]
    assert walk(graph, [A, B, D]) == [1.0, 3.0, 2.0, 2.0]


def test_a_phrase_that_begins_another_counts_beside_it():
    graph = ContextGraph([([A, B], 1.0), ([A, B, C], 1.0)])
    assert walk(graph, [A, B])[-1] == 2.0
    assert walk(graph, [A, B, C])[-1] == 5.0
    assert walk(graph, [A, B, D])[-1] == 2.0


def test_occurrences_repeat_overlap_and_nest():
    graph = ContextGraph([([A, A], 1.0)])
    assert walk(graph, [A, A, A, A])[-1] == 6.0
    assert walk(ContextGraph([([A, B], 1.0)]), [A, B, D, A, B])[-1] == 4.0
    assert walk(ContextGraph([([A, B, C], 1.0), ([B], 5.0)]), [A, B, C])[-1] == 8.0


def test_signs_can_be_mixed():
    graph = ContextGraph([([A, B], 3.0), ([A, C], -2.0)])
    assert walk(graph, [A, B]) == [3.0, 6.0, 6.0]
    assert walk(graph, [A, C]) == [3.0, -4.0, -4.0]
    assert walk(graph, [A, D]) == [3.0, 0.0, 0.0]


def test_boost_zero_and_empty_phrases_change_nothing():
    assert len(ContextGraph([([A, B], 0.0), ([], 3.0)])) == 1
    assert walk(ContextGraph([([A, B], 0.0)]), [A, B]) == [0.0, 0.0, 0.0]
    negative = [([A, C], -2.0)]
    with_zero = ContextGraph([*negative, ([A, B], 0.0)])
    assert walk(with_zero, [A, B, A, C]) == walk(ContextGraph(negative), [A, B, A, C])


def test_the_last_boost_of_a_phrase_counts():
    assert walk(ContextGraph([([A, B], 1.0), ([A, B], 3.0)]), [A, B]) == [3.0, 6.0, 6.0]
    assert walk(ContextGraph([([A, B], 1.0), ([A, B], 0.0)]), [A, B]) == [0.0, 0.0, 0.0]


phrases = st.lists(
    st.tuples(st.lists(st.integers(1, 3), max_size=5), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 4.0])), max_size=6
)


@settings(max_examples=300, deadline=None)
@given(phrases, st.lists(st.integers(1, 4), max_size=20))
def test_every_sequence_scores_as_defined(by_definition, listed, tokens):
    graph = ContextGraph(listed)
    state, total = graph.start, 0.0
    for place, token in enumerate(tokens, start=1):
        state, delta = graph.advance(state, token)
        total += delta
        completed, pending = by_definition(tokens[:place], listed)
        assert total == completed + pending  # halves add up exactly
        assert total + graph.finalize(state) == completed


@settings(max_examples=200, deadline=None)
@given(phrases, st.lists(st.integers(1, 4), max_size=20))
def test_the_arrays_hold_the_same_automaton(listed, tokens):
    graph = ContextGraph(listed)
    flat = graph.arrays
    state = other = graph.start
    for token in tokens:
        state, delta = graph.advance(state, token)
        before = other
        while True:
            begin, end = flat.arc_begin[other], flat.arc_begin[other + 1]
            place = begin + int(np.searchsorted(flat.arc_token[begin:end], token))
            if place < end and flat.arc_token[place] == token:
                other = int(flat.arc_target[place])
                break
            other = int(flat.fail[other])
            if other < 0:
                other = 0
                break
        assert other == state
        assert delta == flat.pending[other] + flat.reward[other] - flat.pending[before]
    assert len(flat.fail) == len(graph)


def test_the_module_imports_no_torch():
    code = "import sys, oasr_core.decoding.context; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
