"""Segments that timestamp tokens mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.decoding.base import TokenSpan
from oasr_whisper.segments import segment

T = 100


def stamp(seconds):
    return T + round(seconds * 50)


def test_one_segment():
    assert segment([stamp(0.4), 1, 2, stamp(2.0)], T, 3.0) == ([TokenSpan(0, 4, 0.4, 2.0)], None)


def test_one_segment_without_an_end():
    assert segment([stamp(0.4), 1, 2], T, 3.0) == ([TokenSpan(0, 3, 0.4, 3.0)], None)
    assert segment([1, 2], T, 3.0) == ([TokenSpan(0, 2, 0.0, 3.0)], None)


def test_nothing_said():
    assert segment([], T, 3.0) == ([], None)
    assert segment([stamp(0.2)], T, 3.0) == ([TokenSpan(0, 1, 0.2, 3.0)], None)


def test_a_single_timestamp_ends_it_all():
    tokens = [stamp(0), 1, stamp(1.0), stamp(1.5), 2, stamp(2.0)]
    assert segment(tokens, T, 5.0) == ([TokenSpan(0, 3, 0.0, 1.0), TokenSpan(3, 6, 1.5, 2.0)], None)


def test_a_pair_at_the_end_is_where_to_go_on():
    tokens = [stamp(0), 1, stamp(1.0), stamp(1.0), 2, stamp(2.5), stamp(3.0)]
    spans, consumed = segment(tokens, T, 30.0)
    assert consumed == 2.5
    assert spans == [TokenSpan(0, 3, 0.0, 1.0), TokenSpan(3, 6, 1.0, 2.5), TokenSpan(6, 7, 2.5, 30.0)]


def test_unfinished_text_begins_where_to_go_on():
    tokens = [stamp(0), 1, stamp(1.0), stamp(1.2), 2, 3]
    spans, consumed = segment(tokens, T, 30.0)
    assert consumed == 1.0
    assert spans == [TokenSpan(0, 3, 0.0, 1.0), TokenSpan(3, 6, 1.0, 30.0)]


@pytest.mark.parametrize("end", [0.0, 5.0, 6.0])
def test_what_leads_nowhere_is_no_place_to_go_on(end):
    _, consumed = segment([stamp(0.0), 1, stamp(end), stamp(end), 2], T, 5.0)
    assert consumed is None


token = st.integers(0, 5) | st.integers(T, T + 1500)


@given(st.lists(token, max_size=12))
def test_spans_cover_all_tokens_in_order(tokens):
    spans, consumed = segment(tokens, T, 30.0)
    assert [span.first for span in spans] == [0, *(span.last for span in spans)][: len(spans)]
    assert not tokens or spans[-1].last == len(tokens)
    assert all(span.start <= span.end for span in spans)
    assert consumed is None or 0.0 < consumed < 30.0
