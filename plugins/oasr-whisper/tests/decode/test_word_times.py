"""Words around pauses and punctuation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oasr_core.decoding.base import TokenSpan
from oasr_whisper.word_times import word_times


def times(pieces, starts, segments=None):
    spans = segments or [TokenSpan(0, len(pieces), 0.0, starts[-1])]
    return [(round(a, 2), round(b, 2)) for a, b in word_times(pieces, starts, spans)]


def test_tokens_of_a_word_share_it():
    assert times(["He", "llo", " world"], [0.0, 0.2, 0.5, 0.9]) == [(0.0, 0.2), (0.2, 0.5), (0.5, 0.9)]


def test_punctuation_lasts_no_time():
    pieces = ["So", ",", " it", " is", "."]
    assert times(pieces, [0.0, 0.3, 0.5, 0.7, 0.9, 1.0]) == [(0.0, 0.3), (0.3, 0.3), (0.5, 0.7), (0.7, 0.9), (0.9, 0.9)]


def test_tokens_without_text_stand_beside_a_word():
    pieces = ["", "one", "", "", " two", ""]
    starts = [0.1, 0.1, 0.5, 0.5, 0.5, 0.9, 0.9]
    assert times(pieces, starts) == [(0.1, 0.1), (0.1, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.9), (0.9, 0.9)]


def test_a_pause_before_a_sentence_is_cut():
    pieces = [" one", " two", ".", " Three", " four"]
    found = times(pieces, [0.0, 0.2, 0.4, 0.5, 2.5, 2.7])
    assert found[3] == (2.1, 2.5), "twice the usual 0.2 s"
    assert found[4] == (2.5, 2.7)


def test_a_pause_at_the_beginning_is_cut():
    assert times([" one", " two", " three"], [0.0, 3.0, 3.2, 3.4])[0] == (2.6, 3.0)
    both = times([" one", " two", " three", " four", " five"], [0.0, 2.0, 3.0, 3.2, 3.4, 3.6])
    assert both[:2] == [(2.2, 2.6), (2.6, 3.0)]


def test_first_and_last_words_keep_to_their_segment():
    pieces = ["", " one", " two", " six", " ten", " three", ""]
    starts = [0.0, 0.0, 0.9, 1.2, 1.5, 1.8, 3.0, 3.0]
    found = times(pieces, starts, [TokenSpan(0, 7, 0.6, 2.2)])
    assert found[1] == (0.6, 0.9)
    assert found[5] == (1.8, 2.2)


def test_the_second_segment_counts_its_pause_from_the_first():
    pieces = [" one", " two", " three", " four"]
    starts = [0.0, 0.3, 0.6, 4.0, 4.3]
    spans = [TokenSpan(0, 2, 0.0, 0.6), TokenSpan(2, 4, 3.4, 4.3)]
    assert times(pieces, starts, spans)[2] == (3.4, 4.0)


def test_characters_of_scripts_without_spaces_are_words():
    assert times(["你", "好", "。"], [0.0, 0.2, 0.5, 0.6]) == [(0.0, 0.2), (0.2, 0.5), (0.5, 0.5)]


def test_nothing_said():
    assert word_times([], [0.3], []) == []
    assert times(["", ""], [0.0, 0.0, 0.0]) == [(0.0, 0.0)] * 2
    assert times([",", "."], [0.0, 0.1, 0.2]) == [(0.0, 0.0)] * 2


pieces = st.lists(st.sampled_from([" a", "b", " c", ".", ",", "", " -", "你", " "]), max_size=12)


@given(pieces, st.data())
def test_times_never_run_backwards(pieces, data):
    steps = data.draw(st.lists(st.integers(0, 150), min_size=len(pieces) + 1, max_size=len(pieces) + 1))
    starts = [sum(steps[: index + 1]) / 50 for index in range(len(steps))]
    edge = data.draw(st.integers(0, len(pieces)))
    middle = data.draw(st.integers(0, 500)) / 50
    spans = [TokenSpan(0, edge, 0.0, middle), TokenSpan(edge, len(pieces), middle, starts[-1])]
    found = word_times(pieces, starts, spans)
    assert len(found) == len(pieces)
    flat = [second for pair in found for second in pair]
    assert flat == sorted(flat)
    assert all(0.0 <= second <= starts[-1] + 1e-9 for second in flat)
