"""Words: substrings of the text in order, times of their tokens, mean posterior."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.alignment import align_words, token_times, word_spans
from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer

WORDS = DecodingOptions(word_timestamps=True)


def brief(out):
    return [(word.word, word.start, word.end) for word in out.words]


def split(text):
    return [text[a:b] for a, b in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \t\n\u3000", []),
        ("ONE TWO", ["ONE", "TWO"]),
        ("  it's  well-known, ok? ", ["it's", "well-known,", "ok?"]),
        ("你好", ["你", "好"]),
        ("你好，世界。", ["你", "好，", "世", "界。"]),
        ("他说「你好」。", ["他", "说", "「你", "好」。"]),
        ("用GPU算3次", ["用", "GPU", "算", "3", "次"]),
        ("한국 말", ["한", "국", "말"]),
        ("ひらがなカー", ["ひ", "ら", "が", "な", "カ", "ー"]),
        ("マイク・ジョ", ["マ", "イ", "ク・", "ジ", "ョ"]),
        ("か\u3099き", ["か\u3099", "き"]),
        ("naïve Ωmega", ["naïve", "Ωmega"]),
        ("(a) (b", ["(a)", "(b"]),
        ("hi！你", ["hi！", "你"]),
    ],
)
def test_what_a_word_is(text, words):
    assert split(text) == words


@given(st.text(st.sampled_from("ab，。「」(,你好か\u3099한 \u3000"), max_size=30))
def test_words_are_the_text_without_its_whitespace(text):
    assert "".join(split(text)) == "".join(text.split())
    assert not any(char.isspace() for word in split(text) for char in word)
    assert all(sum(char in "你好か한" for char in word) <= 1 for word in split(text))


def test_a_token_lasts_a_frame_at_most():
    assert token_times([0, 1, 5, 5, 9], 0.04, 0.38) == [
        (0.0, 0.04),
        (0.04, 0.08),
        (0.2, 0.2),
        (0.2, 0.24),
        (0.36, 0.38),
    ]


def test_words_of_pieces(bpe, make_hyps, finalise):
    hyps = make_hyps([2, 3, 4, 5, 6, 8], [2, 10, 12, 13, 20, 21], [math.log(p) for p in (0.9, 0.8, 0.6, 0.5, 0.7, 0.3)])
    out = finalise(bpe, hyps, WORDS)
    assert out.text == "SIX THREE ONE,"
    assert brief(out) == [("SIX", 0.08, 0.12), ("THREE", 0.4, 0.52), ("ONE,", 0.52, 0.88)]
    assert [word.confidence for word in out.words] == pytest.approx([0.9, 0.7, 0.5])


def test_marks_and_special_tokens_alone_belong_to_no_word(bpe, make_hyps, finalise):
    hyps = make_hyps([1, 9, 6, 1, 9, 6], [0, 1, 5, 6, 7, 9], [0.0, 0.0, math.log(0.5), 0.0, 0.0, math.log(0.4)])
    out = finalise(bpe, hyps, WORDS)
    assert out.text == "E E"
    assert brief(out) == [("E", 0.2, 0.24), ("E", 0.36, 0.4)]
    assert [word.confidence for word in out.words] == pytest.approx([0.5, 0.4])


def test_words_of_one_token_share_its_time(bpe, cjk, make_hyps, finalise):
    out = finalise(bpe, make_hyps([2, 7], [0, 10], [-0.1, -0.2]), WORDS)
    assert out.text == "SIX of the"
    assert brief(out) == [("SIX", 0.0, 0.04), ("of", 0.4, pytest.approx(0.42)), ("the", pytest.approx(0.42), 0.44)]
    out = finalise(cjk, make_hyps([1, 2, 4, 3, 5, 8, 9, 12], [0, 5, 6, 10, 11, 20, 21, 30]), WORDS)
    assert out.text == "你好，世界。OK 한"
    assert brief(out) == [
        ("你", 0.0, 0.04),
        ("好，", 0.2, 0.28),
        ("世", 0.4, pytest.approx(0.42)),
        ("界。", pytest.approx(0.42), 0.48),
        ("OK", 0.8, 0.84),
        ("한", 1.2, 1.24),
    ]


def test_a_character_of_several_tokens_starts_with_the_first(bytewise, make_hyps, finalise):
    tokens = bytewise.encode("a 你é")
    assert len(tokens) == 7
    out = finalise(
        bytewise, make_hyps(tokens, [0, 1, 10, 11, 12, 20, 21], [math.log(0.5)] * 6 + [math.log(0.7)]), WORDS
    )
    assert brief(out) == [("a", 0.0, 0.04), ("你", 0.4, 0.52), ("é", 0.8, 0.88)]
    assert [word.confidence for word in out.words] == pytest.approx([0.5, 0.5, 0.6])


def test_no_time_lies_beyond_the_audio(bpe, make_hyps, finalise):
    out = finalise(bpe, make_hyps([2, 3, 4], [0, 24, 26], [-0.1] * 3), WORDS, duration=1.0)
    assert brief(out) == [("SIX", 0.0, 0.04), ("THREE", 0.96, 1.0)]
    assert out.timestamps == [0.0, 0.96, 1.0]
    assert out.segments[0].end == 1.0


@given(st.floats(0.0, 3.0), st.integers(0, 60), st.integers(1, 60))
def test_shares_of_one_token_stay_within_it(duration, frame, count):
    text = "好" * count
    times = token_times([frame, frame + 1], 0.04, duration)
    words = align_words(text + "!", [text, "!"], times, None, lambda _: False)
    assert "".join(word.word for word in words) == text + "!"
    assert words[0].start == times[0][0]
    assert words[-1].end == times[1][1]
    for word, following in itertools.pairwise(words):
        assert word.start <= word.end <= following.start <= duration
    assert words[-1].end <= duration


texts = st.text(st.sampled_from("ab ,，你好か한é😀 "), max_size=25)


@settings(deadline=None)
@given(texts, st.data())
def test_any_text_and_any_frames(text, data):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    if tokens and data.draw(st.booleans()):
        tokens = tokens[: data.draw(st.integers(0, len(tokens)))]  # may end inside a character
    steps = data.draw(st.lists(st.integers(0, 4), min_size=len(tokens), max_size=len(tokens)))
    frames = [sum(steps[: i + 1]) for i in range(len(steps))]
    duration = data.draw(st.floats(0.0, 5.0))
    posteriors = data.draw(st.lists(st.floats(-20.0, 0.0), min_size=len(tokens), max_size=len(tokens)))
    hyps = Hypotheses([Hypothesis(tokens, frames, posteriors)])
    out = OutputProcessor(tokenizer, 0.04).final("r", hyps, WORDS, finish_reason="stop", duration=duration)
    assert "".join(word.word for word in out.words) == "".join(out.text.split())
    cursor = before = 0.0
    for word in out.words:
        cursor = out.text.index(word.word, int(cursor)) + len(word.word)
        assert before <= word.start <= word.end <= duration
        assert 0.0 < word.confidence <= 1.0
        before = word.end - 1e-9  # shares of one token add up within rounding
    assert all(0.0 <= time <= duration for time in out.timestamps)
