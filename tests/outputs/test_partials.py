"""Partials: cumulative, incremental, never a broken character, and each output owns its lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer

PLAIN = DecodingOptions()


def hypothesis_of(tokens, frames):
    return Hypotheses([Hypothesis(tokens, frames, [0.0] * len(tokens), -0.5)])


def test_a_partial_is_cumulative_and_open(bpe):
    processor = OutputProcessor(bpe, 0.04)
    state = processor.open()
    first = processor.partial(state, "r", hypothesis_of([2], [1]), DecodingOptions(word_timestamps=True))
    second = processor.partial(state, "r", hypothesis_of([2, 3, 4], [1, 5, 9]), PLAIN)
    assert (first.text, first.tokens, first.timestamps) == ("SIX", [[2]], [0.04])
    assert (second.text, second.tokens, second.timestamps) == ("SIX THREE", [[2, 3, 4]], [0.04, 0.2, 0.36])
    assert (second.nbest_texts, second.scores) == (["SIX THREE"], [-0.5])
    for out in (first, second):
        assert (out.finished, out.is_segment_final, out.finish_reason) == (False, False, None)
        assert (out.words, out.segments, out.confidence) == (None, [], None)


def test_only_new_tokens_are_decoded(bpe):
    processor = OutputProcessor(bpe, 0.04)
    state = processor.open()
    pushed = []
    push = state.decoder.push
    state.decoder.push = lambda ids: pushed.append(list(ids)) or push(ids)
    tokens, frames = [], []
    for frame, token in enumerate([2, 3, 4, 5, 6]):
        tokens.append(token)  # grown in place, as a session's list is
        frames.append(frame)
        processor.partial(state, "r", hypothesis_of(tokens, frames), PLAIN)
        assert processor.partial(state, "r", hypothesis_of(tokens, frames), PLAIN).tokens == [tokens]
    assert pushed == [[2], [3], [4], [5], [6]]
    assert state.text == "SIX THREE ONE"
    assert bpe.whole_decodes == 0


@pytest.mark.parametrize(
    ("revised", "text"), [([5, 6], "ONE"), ([2], "SIX"), ([], ""), ([2, 5, 6, 8], "SIX ONE,"), ([2, 3, 4], "SIX THREE")]
)
def test_a_revised_hypothesis_is_decoded_anew(bpe, revised, text):
    processor = OutputProcessor(bpe, 0.04)
    state = processor.open()
    processor.partial(state, "r", hypothesis_of([2, 3], [1, 2]), PLAIN)
    out = processor.partial(state, "r", hypothesis_of(revised, list(range(len(revised)))), PLAIN)
    assert (out.text, out.tokens) == (text, [revised])
    assert out.timestamps == [0.0, 0.04, 0.08, 0.12][: len(revised)]
    out = processor.partial(state, "r", hypothesis_of([*revised, 8], list(range(len(revised) + 1))), PLAIN)
    assert out.text == text + ","


def test_times_may_move_under_the_same_tokens(bpe):
    processor = OutputProcessor(bpe, 0.04)
    state = processor.open()
    processor.partial(state, "r", hypothesis_of([2, 3], [1, 2]), PLAIN)
    assert processor.partial(state, "r", hypothesis_of([2, 3], [1, 3]), PLAIN).timestamps == [0.04, 0.12]
    without = Hypotheses([Hypothesis([2, 3])])
    assert processor.partial(state, "r", without, PLAIN).timestamps is None


def test_streams_do_not_share_text(bpe):
    processor = OutputProcessor(bpe, 0.04)
    one, two = processor.open(), processor.open()
    processor.partial(one, "1", hypothesis_of([2], [0]), PLAIN)
    assert processor.partial(two, "2", hypothesis_of([5, 6], [0, 1]), PLAIN).text == "ONE"
    assert processor.partial(one, "1", hypothesis_of([2, 8], [0, 1]), PLAIN).text == "SIX,"


@given(st.text(st.sampled_from("aé你😀 "), max_size=12), st.lists(st.integers(1, 5), max_size=40))
def test_partials_grow_without_broken_characters(text, sizes):
    tokenizer = ByteTokenizer()
    processor = OutputProcessor(tokenizer, 0.04)
    state = processor.open()
    tokens = tokenizer.encode(text)
    before, cursor = "", 0
    for size in [*sizes, len(tokens)]:
        cursor = min(cursor + size, len(tokens))
        out = processor.partial(state, "r", hypothesis_of(tokens[:cursor], list(range(cursor))), PLAIN)
        assert "\ufffd" not in out.text
        assert text.startswith(out.text)
        assert out.text.startswith(before)
        before = out.text
    assert before == text
    hyps = hypothesis_of(tokens, list(range(len(tokens))))
    assert processor.final("r", hyps, PLAIN, finish_reason="stop", duration=1.0).text == text
