"""Hotwords under modified beam search: against the definition, in company, chunk by chunk, by request and engine."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.context import ContextGraph
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions, Hotword

# ByteTokenizer gives chr(token - 1) the id token: phrases of the labels 1 to 7.
LETTERS = {token: chr(token - 1) for token in range(1, 8)}
PHRASES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.sampled_from([-2.0, -0.5, 0.0, 1.5, 4.0])
    ),
    max_size=4,
)


def hotwords(phrases):
    return tuple(Hotword.model_construct(phrase=spell(tokens), boost=boost) for tokens, boost in phrases)


def spell(tokens):
    return "".join(LETTERS[token] for token in tokens)


def scorer(phrases):
    graph = ContextGraph(phrases)

    def score(tokens):
        state, total = graph.start, 0.0
        for token in tokens:
            state, change = graph.advance(state, token)
            total += change
        pending = -graph.finalize(state)
        return total - pending, pending

    return score


def check(hyps, want):
    assert [(h.tokens, h.frames) for h in hyps.nbest] == [(tokens, times) for tokens, _, _, times, _ in want]
    for hyp, (tokens, log_prob, kept, _, _) in zip(hyps.nbest, want, strict=True):
        assert hyp.context_score == pytest.approx(kept)
        assert hyp.score == pytest.approx((log_prob + kept) / (len(tokens) + 2), abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 40),
    requests=st.lists(st.tuples(st.lists(st.integers(0, 19), max_size=10), PHRASES), min_size=1, max_size=4),
    engine=PHRASES,
    unk_id=st.sampled_from([None, 8]),
    vocab_size=st.sampled_from([9, 14]),
)
def test_equals_the_textbook_for_every_stream_of_a_batch(
    make_script, as_output, textbook_beam, seed, requests, engine, unk_id, vocab_size
):
    script = make_script(seed, vocab_size=vocab_size, unk_id=unk_id, blank_bias=1.0)
    strategy = script.strategy(search="beam", hotwords=hotwords(engine))
    asked = [DecodingOptions.model_construct(n_best=4, hotwords=hotwords(phrases)) for _, phrases in requests]
    results = strategy.decode_offline(as_output([frames for frames, _ in requests]), asked)
    for hyps, (frames, phrases) in zip(results, requests, strict=True):
        check(hyps, textbook_beam(script, frames, score_context=scorer([*engine, *phrases])))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 40),
    chunks=st.lists(st.lists(st.integers(0, 19), max_size=4), max_size=5),
    phrases=st.tuples(PHRASES, PHRASES),
)
def test_chunks_equal_the_whole_with_company_of_other_hotwords(make_script, as_output, seed, chunks, phrases):
    strategy = make_script(seed, vocab_size=10).strategy(search="beam")
    asked = [DecodingOptions.model_construct(n_best=4, hotwords=hotwords(p)) for p in phrases]
    sessions = [strategy.open(options) for options in asked]
    for index, chunk in enumerate(chunks):
        here = sessions if index % 2 else sessions[::-1]
        strategy.decode_chunk(here, as_output([chunk] * 2), [False] * 2)
    spoken = [frame for chunk in chunks for frame in chunk]
    for session, options in zip(sessions, asked, strict=True):
        (want,) = strategy.decode_offline(as_output([spoken]), [options])
        got = strategy.current(session)
        assert [(h.tokens, h.frames) for h in got.nbest] == [(h.tokens, h.frames) for h in want.nbest]
        assert [h.score for h in got.nbest] == pytest.approx([h.score for h in want.nbest], abs=1e-6)
        assert [h.context_score for h in got.nbest] == pytest.approx([h.context_score for h in want.nbest])


def test_a_boost_brings_a_phrase_and_an_avoided_one_goes(make_script, as_output):
    script = make_script(0, vocab_size=100, blank_bias=0.0)
    script.table[:] = -6.0
    script.table[0, :, 0], script.table[1, :, [1 + ord("a"), 1 + ord("b")]] = 3.0, math.log(0.5)
    script.table[1, :, 1 + ord("a")] += 0.5
    strategy = script.strategy(search="beam")

    def best(**boosts):
        asked = DecodingOptions(hotwords=tuple(Hotword(phrase=p, boost=b) for p, b in boosts.items()))
        (hyps,) = strategy.decode_offline(as_output([[0, 1, 0]]), [asked])
        return "".join(chr(token - 1) for token in hyps.best.tokens)

    assert (best(), best(b=2.0), best(a=-2.0), best(a=0.0)) == ("a", "b", "b", "a")


def test_phrases_that_cannot_be_encoded_are_reported_or_refused(make_script, as_output):
    script = make_script(0, vocab_size=100)
    asked = DecodingOptions(hotwords=("ÿ", "ab"))
    (hyps,) = script.strategy(search="beam").decode_offline(as_output([[1]]), [asked])
    assert hyps.unencoded_hotwords == ["ÿ"]
    strict = script.strategy(search="beam", strict_hotwords=True)
    strict.validate(DecodingOptions(hotwords=("ab",)), "offline")
    with pytest.raises(RequestRefusedError, match="'ÿ' cannot be encoded"):
        strict.validate(asked, "offline")
    with pytest.raises(ConfigError, match="cannot be encoded"):
        script.strategy(search="beam", strict_hotwords=True, hotwords=("ÿ",))


def test_labels_that_say_nothing_are_part_of_no_phrase(make_script, as_output):
    script = make_script(0, vocab_size=100, unk_id=1 + ord("a"))
    (hyps,) = script.strategy(search="beam").decode_offline(as_output([[1]]), [DecodingOptions(hotwords=("ab",))])
    assert hyps.unencoded_hotwords == ["ab"]


def test_contexts_are_shared_and_the_oldest_forgotten(make_script, as_output):
    strategy = make_script(0, vocab_size=100).strategy(search="beam")
    shared = [strategy.open(DecodingOptions(hotwords=("ab",))).context for _ in range(2)]
    assert shared[0] is shared[1]
    counts = defaultdict(int)
    for number in range(80):
        session = strategy.open(DecodingOptions(hotwords=(Hotword(phrase="ab", boost=1.0 + number),)))
        counts[id(session.context)] += 1
        strategy.decode_chunk([session], as_output([[1, 2]]), [True])
        strategy.close(session)
    assert strategy.open(DecodingOptions(hotwords=("ab",))).context is not shared[0]
