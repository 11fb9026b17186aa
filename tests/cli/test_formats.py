from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest

from oasr_core.cli import formats
from oasr_core.cli.formats import FileResult, OutputFormat, ResultWriter, render, render_srt, render_vtt, subtitle_cues
from oasr_core.errors import ConfigError, OasrError
from oasr_core.request import RequestOutput, Segment, WordTiming


def output(text: str, words: list[tuple[str, float, float]] | None = None, **fields) -> RequestOutput:
    timings = None if words is None else [WordTiming(*word) for word in words]
    return RequestOutput("r", text=text, words=timings, finished=True, finish_reason="stop", **fields)


def evenly(text: str, seconds: float = 0.3) -> RequestOutput:
    words = text.split()
    return output(text, [(word, i * seconds, (i + 1) * seconds) for i, word in enumerate(words)])


def writer(files: list[str], name: str, output_dir: Path | None = None):
    out, err = io.StringIO(), io.StringIO()
    return ResultWriter(files, OutputFormat(name), out, err, output_dir), out, err


def test_record_has_the_documented_keys():
    result = FileResult(
        "a.wav",
        1.5,
        output("one two", [("one", 0.1, 0.4), ("two", 0.5, 0.9)], tokens=[[3, 4], [3]], scores=[-0.5, -2.0]),
    )
    assert result.record() == {
        "file": "a.wav",
        "text": "one two",
        "tokens": [3, 4],
        "score": -0.5,
        "words": [
            {"word": "one", "start": 0.1, "end": 0.4, "confidence": None},
            {"word": "two", "start": 0.5, "end": 0.9, "confidence": None},
        ],
        "segments": [],
        "finish_reason": "stop",
        "duration": 1.5,
    }


def test_record_of_a_family_that_finds_out_more():
    words = (WordTiming("two", 2.0, 2.5, 0.5),)
    segments = [Segment("one", 0.0, 1.5), Segment("two", 2.0, 2.5, words)]
    found = output("one two", segments=segments, language="de", no_speech_prob=0.25, temperature=0.0)
    record = FileResult("a.wav", 3.0, found).record()
    assert list(record)[:6] == ["file", "text", "tokens", "score", "words", "segments"]
    assert list(record)[6:] == ["language", "no_speech_prob", "temperature", "finish_reason", "duration"]
    assert record["segments"] == [
        {"text": "one", "start": 0.0, "end": 1.5, "words": None},
        {
            "text": "two",
            "start": 2.0,
            "end": 2.5,
            "words": [{"word": "two", "start": 2.0, "end": 2.5, "confidence": 0.5}],
        },
    ]
    assert (record["language"], record["no_speech_prob"], record["temperature"]) == ("de", 0.25, 0.0)


def test_record_of_an_empty_output_and_of_infinite_scores_is_valid_json():
    empty = FileResult("a", 0.0, output("")).record()
    assert (empty["tokens"], empty["score"], empty["words"]) == ([], None, None)
    infinite = FileResult("a", 0.0, output("x", scores=[float("-inf")], tokens=[[1]])).record()
    assert json.dumps(infinite, allow_nan=False)
    words = [WordTiming("x", 0.0, 1.0, float("nan"))]
    assert FileResult("a", 0.0, RequestOutput("r", words=words)).record()["words"][0]["confidence"] is None


def test_record_of_a_failure():
    assert FileResult("b.wav", error="broken").record() == {"file": "b.wav", "error": "broken"}


def test_results_are_written_in_input_order():
    w, out, _ = writer(["a", "b", "c"], "jsonl")
    w.put(2, FileResult("c", 1.0, output("three")))
    w.put(0, FileResult("a", 1.0, output("one")))
    assert [json.loads(line)["file"] for line in out.getvalue().splitlines()] == ["a"]
    w.put(1, FileResult("b", error="no"))
    w.close()
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["file"] for row in rows] == ["a", "b", "c"]
    assert rows[1] == {"file": "b", "error": "no"}
    assert w.failed == 1


def test_times_in_json_have_no_digits_of_rounding():
    result = FileResult("a", 1.0, output("one", [("one", 0.1 + 0.2, 136.60000000000002)]))
    assert result.record()["words"] == [{"word": "one", "start": 0.3, "end": 136.6, "confidence": None}]


def test_text_of_one_and_of_several_files():
    w, out, _ = writer(["a"], "text")
    w.put(0, FileResult("a", 1.0, output("one two")))
    assert out.getvalue() == "one two\n"
    w, out, err = writer(["a", "b", "c"], "text")
    w.put(0, FileResult("a", 1.0, output("one\ntwo")))
    w.put(1, FileResult("b", error="truncated"))
    w.put(2, FileResult("c", 1.0, output("")))
    assert out.getvalue() == "a\tone two\nc\t\n"
    assert err.getvalue() == "error: b: truncated\n"


def test_json_is_one_document():
    w, out, _ = writer(["a"], "json")
    w.put(0, FileResult("a", 1.0, output("één")))
    assert out.getvalue() == ""
    w.close()
    assert json.loads(out.getvalue())["text"] == "één"
    assert "één" in out.getvalue()
    w, out, _ = writer(["a", "b"], "json")
    w.put(1, FileResult("b", error="no"))
    w.put(0, FileResult("a", 1.0, output("one")))
    w.close()
    assert [sorted(row)[0] for row in json.loads(out.getvalue())] == ["duration", "error"]


def test_a_transcript_cut_short_is_said():
    w, out, err = writer(["a"], "text")
    w.put(0, FileResult("a", 1.0, RequestOutput("r", text="one", finished=True, finish_reason="length")))
    assert out.getvalue() == "one\n"
    assert "warning: a: the transcript is cut short" in err.getvalue()
    assert w.failed == 0


@pytest.mark.parametrize(("name", "suffix"), [("text", "txt"), ("json", "json"), ("jsonl", "jsonl"), ("srt", "srt")])
def test_output_dir_gets_one_file_each(tmp_path: Path, name: str, suffix: str):
    w, out, err = writer(["x/a.wav", "-", "bad.wav"], name, tmp_path)
    w.put(0, FileResult("x/a.wav", 1.0, evenly("one two")))
    w.put(1, FileResult("-", 1.0, evenly("three")))
    w.put(2, FileResult("bad.wav", error="broken"))
    w.close()
    assert out.getvalue() == ""
    assert "error: bad.wav: broken" in err.getvalue()
    assert "one two" in (tmp_path / f"a.{suffix}").read_text()
    assert "three" in (tmp_path / f"stdin.{suffix}").read_text()
    assert (tmp_path / f"bad.{suffix}").exists() == name.startswith("json")


def test_output_dir_refuses_two_files_of_one_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"x/a\.wav and y/a\.flac would both"):
        writer(["x/a.wav", "y/a.flac"], "vtt", tmp_path)


def test_an_unwritable_file_fails_alone(tmp_path: Path):
    (tmp_path / "a.txt").mkdir()
    w, _, err = writer(["a.wav", "b.wav"], "text", tmp_path)
    w.put(0, FileResult("a.wav", 1.0, output("one")))
    w.put(1, FileResult("b.wav", 1.0, output("two")))
    assert w.failed == 1
    assert "error: a.wav: cannot write" in err.getvalue()
    assert (tmp_path / "b.txt").read_text() == "two\n"


def test_srt_and_vtt_timestamps():
    result = FileResult("a", 4000.0, output("a", [("a", 3661.0015, 3662.5)]))
    assert render(result, OutputFormat.srt) == "1\n01:01:01,002 --> 01:01:02,500\na\n\n"
    assert render(result, OutputFormat.vtt) == "WEBVTT\n\n01:01:01.002 --> 01:01:02.500\na\n"


def test_empty_transcripts_give_valid_empty_subtitles():
    result = FileResult("a", 1.0, output("", []))
    assert render(result, OutputFormat.srt) == ""
    assert render(result, OutputFormat.vtt) == "WEBVTT\n"


def test_vtt_escapes_and_srt_does_not():
    cues = subtitle_cues(output("a<b & c", [("a<b", 0.0, 0.5), ("&", 0.5, 0.6), ("c", 0.6, 0.9)]))
    assert "a&lt;b &amp; c" in render_vtt(cues)
    assert "a<b & c" in render_srt(cues)
    arrow = subtitle_cues(output("-->", [("-->", 0.0, 0.5)]))
    assert render_vtt(arrow).count("-->") == 1


def test_lines_lines_per_cue_and_seconds_are_bounded():
    text = " ".join(f"word{i:03d}" for i in range(200))
    cues = subtitle_cues(evenly(text, 0.5))
    assert all(len(line) <= formats.MAX_LINE_CHARS for cue in cues for line in cue.lines)
    assert all(len(cue.lines) <= formats.MAX_LINES for cue in cues)
    assert all(0 < cue.end_ms - cue.start_ms <= formats.MAX_CUE_SECONDS * 1000 for cue in cues)
    assert all(a.end_ms <= b.start_ms for a, b in pairwise(cues))
    assert " ".join(line for cue in cues for line in cue.lines) == text
    assert max(len(cue.lines) for cue in subtitle_cues(evenly(text, 0.1))) == 2


def test_a_silence_ends_a_cue():
    cues = subtitle_cues(output("a b c", [("a", 0.0, 0.5), ("b", 1.3, 1.5), ("c", 2.4, 2.6)]))
    assert [cue.lines for cue in cues] == [("a b",), ("c",)]
    assert [(cue.start_ms, cue.end_ms) for cue in cues] == [(0, 1500), (2400, 3200)]


def test_a_short_cue_stays_until_the_next_or_the_end():
    words = [("a", 0.0, 0.04), ("b" * 84, 0.5, 0.54), ("c", 0.6, 0.64)]
    cues = subtitle_cues(output(f"a {'b' * 84} c", words), 1.0)
    assert [(cue.start_ms, cue.end_ms) for cue in cues] == [(0, 520), (520, 1000)]
    assert subtitle_cues(output("a", words[:1]))[0].end_ms == 800
    assert subtitle_cues(output("a", words[:1]), 0.02)[0].end_ms == 40


def test_odd_times_give_ordered_cues_of_positive_length():
    words = [("a", -0.2, -0.1), ("b", 5.0, 5.0), ("c", 4.9, 20.0), ("d", 30.0, 30.0)]
    cues = subtitle_cues(output("a b c d", words))
    assert all(cue.end_ms > cue.start_ms >= 0 for cue in cues)
    assert all(a.end_ms <= b.start_ms for a, b in pairwise(cues))


def test_spacing_follows_the_text():
    chinese = output("你好,世界", [("你", 0, 0.2), ("好", 0.2, 0.4), ("世", 0.5, 0.7), ("界", 0.7, 0.9)])
    assert subtitle_cues(chinese)[0].lines == ("你好,世界",)
    punctuated = output(
        'He said: "no", (twice).', [("He", 0, 0.1), ("said", 0.1, 0.2), ("no", 0.3, 0.4), ("twice", 0.5, 1)]
    )
    assert subtitle_cues(punctuated)[0].lines == ('He said: "no", (twice).',)
    unlike = output("ONE TWO", [("one", 0, 0.2), ("two", 0.2, 0.4)])
    assert subtitle_cues(unlike)[0].lines == ("one two",)


def test_a_word_longer_than_a_line_is_cut():
    long = "x" * 100
    cues = subtitle_cues(output(long, [(long, 0.0, 2.0)]))
    assert "".join(line for cue in cues for line in cue.lines) == long
    assert max(len(line) for cue in cues for line in cue.lines) == formats.MAX_LINE_CHARS


def test_segments_serve_where_there_are_no_words():
    segments = [Segment("one two", 1.0, 2.0), Segment("three", 2.1, 3.0, (WordTiming("three", 2.2, 2.9),))]
    cues = subtitle_cues(output("one two three", segments=segments))
    assert cues == [(1000, 2000, ("one two",)), (2200, 3000, ("three",))]


def test_no_cue_joins_two_of_several_segments():
    words = [WordTiming(word, at, at + 0.3) for word, at in (("One.", 0.0), ("Two", 0.3), ("three.", 0.6))]
    segments = [Segment("One.", 0.0, 0.3, tuple(words[:1])), Segment("Two three.", 0.3, 0.9, tuple(words[1:]))]
    timed = [("One.", 0.0, 0.3), ("Two", 0.3, 0.6), ("three.", 0.6, 0.9)]
    assert subtitle_cues(output("One. Two three.", timed, segments=segments)) == [
        (0, 300, ("One.",)),
        (300, 1100, ("Two three.",)),
    ]
    (alone,) = subtitle_cues(output("One. Two three.", timed, segments=[Segment("One. Two three.", 0.0, 0.9)]))
    assert alone == (0, 900, ("One. Two three.",))


def test_a_long_segment_is_cut_and_no_lone_word_is_left():
    text = "It was not so much the loss of the cotton itself, but the fantasy, the hopes, the dreams"
    for words in (None, tuple(WordTiming(word, i * 0.25, i * 0.25 + 0.25) for i, word in enumerate(text.split()))):
        cues = subtitle_cues(output(text, segments=[Segment(text, 0.0, 5.0, words), Segment("built.", 5.0, 6.0)]))
        assert [cue.lines for cue in cues] == [
            ("It was not so much the loss of the cotton",),
            ("itself, but the fantasy, the hopes, the", "dreams"),
            ("built.",),
        ]
        assert cues[0].end_ms == cues[1].start_ms


def test_a_segment_of_few_words_over_a_long_time_is_bounded():
    cues = subtitle_cues(output("one two three", segments=[Segment("one two three", 0.0, 30.0), Segment("x", 30, 31)]))
    assert " ".join(" ".join(cue.lines) for cue in cues) == "one two three x"
    assert all(cue.end_ms - cue.start_ms <= formats.MAX_CUE_SECONDS * 1000 for cue in cues)


def test_text_without_times_is_refused():
    with pytest.raises(OasrError, match="subtitles need times"):
        subtitle_cues(output("one"))
    w, out, err = writer(["a"], "srt")
    w.put(0, FileResult("a", 1.0, output("one")))
    assert (w.failed, out.getvalue()) == (1, "")
    assert "subtitles need times" in err.getvalue()
