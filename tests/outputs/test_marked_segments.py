"""Segments that the model itself marks, tokens with ends of their own, and what else a decoder tells."""

from __future__ import annotations

import math

import pytest

from oasr_core.decoding.alignment import token_times
from oasr_core.decoding.base import Hypotheses, Hypothesis, TokenSpan
from oasr_core.request import DecodingOptions, Segment, WordTiming

PLAIN = DecodingOptions()
WORDS = DecodingOptions(word_timestamps=True)
HALF = math.log(0.5)

# <blank> SIX TH REE <blank> ON E <blank>
TOKENS = [0, 2, 3, 4, 0, 5, 6, 0]


def marked(spans, **fields):
    hypothesis = Hypothesis(list(TOKENS), token_log_probs=[HALF] * len(TOKENS), score=-1.0)
    return Hypotheses([hypothesis], segments=spans, **fields)


def timed(hyps):
    hyps.best.frames = [1, 1, 10, 12, 14, 20, 22, 30]
    hyps.best.end_frames = [1, 4, 12, 14, 14, 22, 26, 30]
    return hyps


def test_tokens_last_until_their_end():
    assert token_times([0, 5, 9], 0.1, 2.0, [3, 9, 12]) == [(0.0, 0.3), (0.5, 0.9), (0.9, 1.2)]
    assert token_times([0, 5], 0.1, 0.7, [8, 9]) == [(0.0, 0.5), (0.5, 0.7)], "not beyond the next, nor the audio"
    assert token_times([3], 0.1, 2.0, [1]) == [(0.3, 0.3)]


def test_segments_have_the_times_of_their_marks(bpe, finalise):
    out = finalise(bpe, marked([TokenSpan(0, 5, 0.0, 0.6), TokenSpan(5, 8, 0.7, 1.1)]), PLAIN)
    assert out.text == "SIX THREE ONE"
    assert out.segments == [Segment("SIX THREE", 0.0, 0.6), Segment("ONE", 0.7, 1.1)]
    assert out.timestamps is None


def test_segments_with_words_last_as_long_as_those(bpe, finalise):
    out = finalise(bpe, timed(marked([TokenSpan(0, 5, 0.0, 0.6), TokenSpan(5, 8, 0.7, 1.1)])), WORDS)
    six, three, one = (
        WordTiming("SIX", 0.04, 0.16, pytest.approx(0.5)),
        WordTiming("THREE", 0.4, 0.56, pytest.approx(0.5)),
        WordTiming("ONE", 0.8, 1.04, pytest.approx(0.5)),
    )
    assert out.words == [six, three, one]
    assert out.segments == [Segment("SIX THREE", 0.04, 0.56, (six, three)), Segment("ONE", 0.8, 1.04, (one,))]


def test_marks_without_text_make_no_segment(bpe, finalise):
    out = finalise(bpe, marked([TokenSpan(0, 1, 0.0, 0.2), TokenSpan(1, 8, 0.2, 1.1)]), PLAIN)
    assert [segment.text for segment in out.segments] == ["SIX THREE ONE"]
    assert finalise(bpe, Hypotheses([Hypothesis([])], segments=[]), WORDS).segments == []


def test_no_segment_lies_beyond_the_audio(bpe, finalise):
    out = finalise(bpe, marked([TokenSpan(0, 8, 0.1, 29.98)]), PLAIN, duration=1.5)
    assert out.segments == [Segment("SIX THREE ONE", 0.1, 1.5)]


def test_what_else_a_decoder_tells(bpe, finalise):
    told = {"consumed_seconds": 0.6, "temperature": 0.4, "language": "en", "language_prob": 0.75}
    out = finalise(bpe, marked(None, **told), PLAIN)
    assert {name: getattr(out, name) for name in told} == told
    silent = finalise(bpe, Hypotheses([Hypothesis([])]), PLAIN)
    assert {name: getattr(silent, name) for name in told} == dict.fromkeys(told)


def test_marks_do_not_count_for_confidence(bpe, finalise):
    hyps = marked(None)
    hyps.best.token_log_probs = [-9.0 if token == 0 else HALF for token in TOKENS]
    assert finalise(bpe, hyps, PLAIN).confidence == pytest.approx(0.5)
    assert finalise(bpe, Hypotheses([Hypothesis([0], token_log_probs=[HALF])]), PLAIN).confidence is None
