"""The terminal output: text, n-best, times, confidence, segments."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.errors import PluginContractError
from oasr_core.request import DecodingOptions, Segment

PLAIN = DecodingOptions()
WORDS = DecodingOptions(word_timestamps=True)
SIX_THREE = [2, 3, 4]


def test_text_tokens_times_and_confidence(bpe, make_hyps, finalise):
    hyps = make_hyps(SIX_THREE, [3, 10, 12], [math.log(0.9), math.log(0.5), math.log(0.7)])
    hyps.language, hyps.no_speech_prob = "en", 0.25
    out = finalise(bpe, hyps, PLAIN)
    assert (out.request_id, out.text, out.tokens, out.scores) == ("r", "SIX THREE", [SIX_THREE], [-1.5])
    assert out.nbest_texts == ["SIX THREE"]
    assert out.timestamps == [0.12, 0.4, 0.48]
    assert out.confidence == pytest.approx(0.7)
    assert out.words is None
    assert out.segments == [Segment("SIX THREE", 0.12, 0.52, None)]
    assert (out.finished, out.is_segment_final, out.finish_reason) == (True, True, "stop")
    assert (out.language, out.no_speech_prob) == ("en", 0.25)


def test_nothing_said(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps([], [], []), WORDS)
    assert (out.text, out.tokens, out.nbest_texts) == ("", [[]], [""])
    assert (out.words, out.segments, out.timestamps, out.confidence) == ([], [], [], None)
    assert finalise(bpe, make_hyps([], [], []), PLAIN).words is None


def test_tokens_that_spell_nothing_make_no_words_and_no_segment(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps([9, 1], [2, 3], [-0.1, -0.1]), WORDS)
    assert (out.text, out.words, out.segments) == ("", [], [])
    assert out.tokens == [[9, 1]]


def test_n_best_keeps_as_many_as_asked(bpe, finalise):
    nbest = [
        Hypothesis([2], [1], [-0.1], -0.5),
        Hypothesis([5, 6], [1, 2], [-1.0, -1.0], -2.0),
        Hypothesis([], [], [], -9.0),
    ]
    out = finalise(bpe, Hypotheses(nbest), DecodingOptions(n_best=2))
    assert out.nbest_texts == ["SIX", "ONE"]
    assert (out.tokens, out.scores) == ([[2], [5, 6]], [-0.5, -2.0])
    assert out.text == "SIX"
    assert finalise(bpe, Hypotheses(nbest), DecodingOptions(n_best=10)).nbest_texts == ["SIX", "ONE", ""]


def test_families_without_times_or_posteriors(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps(SIX_THREE), PLAIN, duration=2.5)
    assert (out.timestamps, out.confidence, out.words) == (None, None, None)
    assert out.segments == [Segment("SIX THREE", 0.0, 2.5, None)]
    with pytest.raises(PluginContractError, match="tokens without frames"):
        finalise(bpe, make_hyps(SIX_THREE), WORDS)
    assert finalise(bpe, make_hyps([]), WORDS).words == []


def test_words_without_posteriors_have_no_confidence(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps(SIX_THREE, [1, 5, 6]), WORDS)
    assert [word.confidence for word in out.words] == [None, None]


def test_confidence_never_exceeds_one(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps([2], [1], [1e-6]), WORDS)
    assert out.confidence == 1.0
    assert out.words[0].confidence == 1.0


def test_segments_carry_the_words(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps(SIX_THREE, [3, 10, 12], [-0.1] * 3), WORDS)
    (segment,) = out.segments
    assert segment.words == tuple(out.words)
    assert segment.start == out.words[0].start
    assert segment.end == out.words[-1].end


def test_numpy_values_become_plain(bpe, finalise):
    hyp = Hypothesis(
        [np.int64(2), np.int64(3)], [np.int64(1), np.int64(4)], [np.float32(-0.1), np.float32(-0.2)], np.float32(-0.3)
    )
    out = finalise(bpe, Hypotheses([hyp], no_speech_prob=np.float32(0.5)), WORDS)
    assert json.loads(json.dumps(out.to_dict()))["tokens"] == [[2, 3]]


def test_a_tokenizer_whose_pieces_do_not_add_up_is_named(bpe, make_hyps, finalise):
    bpe.decode = lambda ids: "SOMETHING ELSE"
    with pytest.raises(PluginContractError, match=r"TableTokenizer\.token_pieces must add up"):
        finalise(bpe, make_hyps(SIX_THREE, [1, 2, 3]), WORDS)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_the_finish_reason_is_handed_through(bpe, make_hyps, reason):
    from oasr_core.outputs import OutputProcessor

    out = OutputProcessor(bpe, 0.04).final("r", make_hyps([2], [0]), PLAIN, finish_reason=reason, duration=1.0)
    assert out.finish_reason == reason
