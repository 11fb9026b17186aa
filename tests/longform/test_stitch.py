"""What one output of several holds: text at seams, times, segments, scores, language."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oasr_core.longform.seam import MAX_WORDS, Shared, find_seam
from oasr_core.longform.stitch import Stitcher
from oasr_core.longform.units import units_of
from oasr_core.request import RequestOutput, Segment, WordTiming


def stitch(recognizer, *parts):
    """Outputs with their windows ``(output, start, end, shared)``, as one."""
    stitcher = Stitcher(recognizer.tokenizer)
    for part in parts:
        stitcher.append(*part)
    return stitcher.result("r")


def raw(recognizer, pieces: list[str], **fields) -> RequestOutput:
    tokens = [recognizer.tokenizer.id(piece) if piece else 0 for piece in pieces]
    return RequestOutput("c", text=recognizer.tokenizer.decode(tokens), tokens=[tokens], **fields)


def test_units_are_the_fewest_whole_tokens_that_spell_whole_words(recognizer):
    output = raw(recognizer, ["", "▁he", "llo", ",▁wo", "rld", "", "▁of▁the", "▁", "end", ".", ""])
    units = units_of(output, recognizer.tokenizer, 0, 0.0)
    assert [unit.text for unit in units] == ["hello, world", " of the", " end."]
    assert [len(unit.tokens) for unit in units] == [5, 2, 4]  # what spells nothing stays with what follows
    assert [unit.key for unit in units] == ["helloworld", "ofthe", "end"]


def test_characters_without_spaces_are_units(recognizer):
    output = raw(recognizer, ["你", "好", "。", "我", "们"], timestamps=[0.0, 0.1, 0.2, 0.3, 0.4])
    units = units_of(output, recognizer.tokenizer, 0, 2.0)
    assert [unit.text for unit in units] == ["你", "好。", "我", "们"]
    assert [unit.start for unit in units] == [2.0, 2.1, 2.3, 2.4]


def test_a_text_without_tokens_is_cut_into_words(recognizer):
    output = RequestOutput("c", text="plain text here")
    assert [unit.text for unit in units_of(output, recognizer.tokenizer, 0, 0.0)] == ["plain", " text", " here"]
    assert stitch(recognizer, (output, 0, 3), (output, 3, 6)).text == "plain text here plain text here"


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["▁one"], ["▁two"], "one two"),
        (["你", "好"], ["我"], "你好我"),
        (["你", "好", "。"], ["我"], "你好。我"),
        (["▁end", "."], ["▁Start"], "end. Start"),
        (["one"], ["two"], "one two"),
        ([], ["▁two"], "two"),
        (["▁one"], [], "one"),
        ([""], [""], ""),
        (["▁one", "▁"], ["▁two"], "one two"),
    ],
)
def test_a_space_stands_where_the_script_has_spaces(recognizer, first, second, text):
    result = stitch(recognizer, (raw(recognizer, first), 0.0, 3.0), (raw(recognizer, second), 3.0, 6.0))
    assert result.text == text


def test_figures_of_the_parts_are_joined(recognizer, spoken):
    one = replace(
        recognizer.output(spoken("aaa bbb"), confidence=0.5), scores=[-1.5, -2.0], language="en", no_speech_prob=0.4
    )
    two = replace(
        recognizer.output(spoken("ccc ddd eee fff", 10.0), 10.0, confidence=0.8),
        scores=[-2.5],
        language="de",
        no_speech_prob=0.1,
        unencoded_hotwords=["ß"],
    )
    three = replace(
        recognizer.output([], confidence=None),
        scores=[],
        language="xx",
        no_speech_prob=0.9,
        unencoded_hotwords=["ß", "§"],
        finish_reason="length",
    )
    result = stitch(recognizer, (one, 0.0, 10.0), (two, 10.0, 20.0), (three, 20.0, 30.0))
    assert result.scores == [-4.0]
    tokens = len(one.tokens[0]), len(two.tokens[0])
    assert result.confidence == pytest.approx((tokens[0] * 0.5 + tokens[1] * 0.8) / sum(tokens))
    assert result.language == "en"
    assert result.no_speech_prob == 0.1
    assert result.unencoded_hotwords == ["ß", "§"]
    assert result.finish_reason == "length"
    assert result.to_dict()["text"] == "aaa bbb ccc ddd eee fff"


def test_a_partial_leaves_what_is_made_of_the_whole_to_the_result(recognizer, spoken):
    stitcher = Stitcher(recognizer.tokenizer)
    stitcher.append(recognizer.output(spoken("aaa bbb")), 0.0, 10.0)
    partial = stitcher.partial("r", None)
    assert (partial.text, partial.finished) == ("aaa bbb", False)
    assert (partial.segments, partial.words, partial.confidence) == ([], None, None)
    assert partial.timestamps == stitcher.result("r").timestamps
    assert stitcher.result("r").words


def test_timestamps_around_nothing_are_not_kept(recognizer):
    stitcher = Stitcher(recognizer.tokenizer)
    assert stitcher.append(raw(recognizer, ["", ""]), 0.0, 10.0) == []
    assert stitcher.append(raw(recognizer, ["", "▁one", ""]), 10.0, 20.0) == [0, 1, 0]
    assert stitcher.result("r").tokens == [[0, 1, 0]]


def test_a_cap_cuts_nothing_off_where_the_next_window_goes_on(recognizer, spoken):
    one = replace(recognizer.output(spoken("aaa bbb")), finish_reason="length")
    two = recognizer.output(spoken("ccc", 8.0), 8.0)
    assert stitch(recognizer, (one, 0.0, 8.0, 0.0, 8.0), (two, 8.0, 20.0)).finish_reason == "stop"
    assert stitch(recognizer, (one, 0.0, 8.0), (two, 8.0, 20.0)).finish_reason == "length"


def test_the_language_of_most_windows_counts(recognizer, spoken):
    parts = [
        (replace(recognizer.output(spoken("word"), i), language=name), i, i + 1)
        for i, name in enumerate(["de", "en", "en"])
    ]
    assert stitch(recognizer, *parts).language == "en"


def test_a_repeated_word_is_dropped_from_everything(recognizer, spoken):
    one = recognizer.output(spoken("alpha bravo charlie", 0.0, 1.0, 0.5))
    two = recognizer.output(spoken("charlie delta", 2.0, 1.0, 0.5), 1.8)
    result = stitch(recognizer, (one, 0.0, 2.8), (two, 1.8, 4.0, 1.0))
    assert result.text == "alpha bravo charlie delta"
    assert [word.word for word in result.words] == ["alpha", "bravo", "charlie", "delta"]
    assert recognizer.tokenizer.decode(result.tokens[0]) == result.text
    assert len(result.timestamps) == len(result.tokens[0])
    assert result.timestamps == sorted(result.timestamps)
    # Segments are cut at the middle of the shared audio.
    assert [(s.text, s.start, s.end) for s in result.segments] == [
        ("alpha bravo charlie", 0.0, pytest.approx(2.3)),
        ("delta", pytest.approx(2.3), pytest.approx(3.5)),
    ]


def test_case_punctuation_and_small_errors_do_not_hide_a_repetition(recognizer, spoken):
    one = recognizer.output(spoken("we went to the theatre, Tonight", 0.0, 0.4))
    two = recognizer.output(spoken("The theater tonight. it rained", 1.2, 0.4), 1.1)
    for words, times in ((True, True), (False, False)):
        first = recognizer.output(spoken("we went to the theatre, Tonight", 0.0, 0.4), words=words, times=times)
        second = recognizer.output(spoken("The theater tonight. it rained", 1.2, 0.4), 1.1, words=words, times=times)
        text = stitch(recognizer, (first, 0.0, 2.4), (second, 1.1, 4.0, 1.3)).text
        assert len(text.split()) == 8
        assert text.casefold().count("tonight") == 1
    assert stitch(recognizer, (one, 0.0, 2.4), (two, 1.1, 4.0, 1.3)).words[-1].word == "rained"


def test_a_word_that_an_edge_cuts_through_is_taken_whole(recognizer, spoken):
    one = recognizer.output(spoken("please read the transcr", 0.0, 0.5, 0.4), words=False, times=False)
    two = recognizer.output(spoken("transcription now", 1.5, 0.5, 0.4), 1.4, words=False, times=False)
    assert stitch(recognizer, (one, 0.0, 1.8), (two, 1.4, 3.0, 0.4)).text == "please read the transcription now"
    one = recognizer.output(spoken("please read the transcription", 0.0, 0.5, 0.4), words=False, times=False)
    two = recognizer.output(spoken("scription now", 1.5, 0.5, 0.4), 1.6, words=False, times=False)
    assert stitch(recognizer, (one, 0.0, 2.0), (two, 1.6, 3.0, 0.4)).text == "please read the transcription now"


def test_words_that_only_one_window_heard_are_kept(recognizer, spoken):
    one = recognizer.output(spoken("early middle late", 0.0, 1.0, 0.4))
    nothing = recognizer.output(spoken("after", 4.0), 1.9)
    assert stitch(recognizer, (one, 0.0, 2.9), (nothing, 1.9, 5.0, 1.0)).text == "early middle late after"
    one = recognizer.output(spoken("early", 0.0))
    two = recognizer.output(spoken("late after", 2.0, 1.0), 1.9)
    assert stitch(recognizer, (one, 0.0, 2.9), (two, 1.9, 5.0, 1.0)).text == "early late after"


def test_different_words_at_one_time_are_kept_once(recognizer, spoken):
    """Nothing matches: what was said before the middle of the shared audio is the first window's."""
    one = recognizer.output(spoken("first alpha bravo", 0.0, 1.0, 0.4))
    two = recognizer.output(spoken("xxxxx yyyyy last", 1.1, 1.0, 0.4), 1.0)
    result = stitch(recognizer, (one, 0.0, 3.0), (two, 1.0, 4.0, 2.0))
    assert result.text == "first alpha yyyyy last"


def test_times_never_run_backwards(recognizer, spoken):
    one = recognizer.output(spoken("alpha bravo", 0.0, 1.0, 1.0))
    two = recognizer.output(spoken("bravo charlie", 1.2, 0.3, 0.3), 1.0)
    result = stitch(recognizer, (one, 0.0, 2.0), (two, 1.0, 4.0, 1.0))
    assert result.text == "alpha bravo charlie"
    assert all(a.end <= b.start for a, b in zip(result.words, result.words[1:], strict=False))
    assert all(word.start <= word.end for word in result.words)
    assert result.timestamps == sorted(result.timestamps)


def test_at_most_forty_words_are_compared(recognizer):
    text = " ".join(f"alpha{i}" for i in range(200))
    first, second = text.split()[:100], text.split()[45:]
    one = units_of(raw(recognizer, [f"▁{word}" for word in first]), recognizer.tokenizer, 0, 0.0)
    two = units_of(raw(recognizer, [f"▁{word}" for word in second]), recognizer.tokenizer, 1, 0.0)
    keep, skip = find_seam(one, two, Shared(0.0, 60.0))
    assert 100 - keep <= MAX_WORDS
    assert skip <= MAX_WORDS


def test_segments_of_a_window_stay_apart(recognizer, spoken):
    said = spoken("alpha bravo charlie delta echo", 0.0, 1.0, 0.4)
    output = recognizer.output(said)
    output.segments = [
        Segment("alpha bravo", 0.0, 1.9),
        Segment("charlie", 2.0, 2.9),
        Segment("delta echo", 3.0, 4.4),
    ]
    two = recognizer.output(spoken("delta echo foxtrot", 3.0, 1.0, 0.4), 2.9)
    two.segments = [Segment("delta", 0.0, 1.0), Segment("echo foxtrot", 1.1, 2.5)]
    result = stitch(recognizer, (output, 0.0, 4.9), (two, 2.9, 6.0, 2.0))
    assert " ".join(segment.text for segment in result.segments) == "alpha bravo charlie delta echo foxtrot"
    assert [(round(s.start, 3), round(s.end, 3)) for s in result.segments] == [
        (0.0, 1.9),
        (2.0, 2.9),
        (3.0, 3.9),
        (4.0, 5.4),
    ]


def test_words_of_a_window_without_tokens_of_their_own_are_spread_by_spelling(recognizer):
    output = raw(
        recognizer,
        ["▁of▁the", "▁end"],
        words=[WordTiming("of", 0.0, 0.1), WordTiming("the", 0.1, 0.2), WordTiming("end", 0.3, 0.4)],
    )
    units = units_of(output, recognizer.tokenizer, 0, 0.0)
    assert [[word.word for word in unit.words] for unit in units] == [["of", "the"], ["end"]]
