"""Endpoints report and commit; words are the same with endpointing on and off."""

from __future__ import annotations

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.decoding.endpoint import DEFAULT_RULES, Endpointer, EndpointRule
from oasr_core.engine import ASREngine
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.testing.markers import marker_audio, spell

#: Seconds of silence that end a segment, 1.2 s: thirty frames of 40 ms.
SILENCE = 30
ON = DecodingOptions(endpointing=True, word_timestamps=True)
SEARCHES = ["greedy", "beam"]


def stream(engine, audio, decoding=None, piece=2_560):
    """All outputs of one stream fed in pieces."""
    request_id = engine.add_streaming_request(decoding=decoding)
    outputs = []
    for start in range(0, len(audio), piece):
        engine.feed_chunk(request_id, audio[start : start + piece], is_last=start + piece >= len(audio))
        outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    return outputs


def commits(outputs):
    return [output for output in outputs if output.is_segment_final and not output.finished]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_pause_ends_a_segment_and_the_stream_goes_on(make_engine, search):
    engine = make_engine(decode_options={"search": search})
    tokens = [1, 2, 3] + [0] * 40 + [4, 5] + [0] * 40 + [6]
    outputs = stream(engine, marker_audio(tokens), ON)
    ends = commits(outputs)
    assert [[segment.text for segment in output.segments] for output in ends] == [["abc"], ["de"]]
    final = outputs[-1]
    assert final.text == spell(tokens) == "abcdef"
    assert [segment.text for segment in final.segments] == ["abc", "de", "f"]
    assert final.segments[1].start == pytest.approx(43 * 0.04)
    assert [word.word for segment in final.segments for word in segment.words] == ["abc", "de", "f"]
    assert ends[1].segments[0].start == final.segments[1].start


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("silence", range(SILENCE - 2, SILENCE + 8))
def test_silence_around_the_rule_then_the_end(make_engine, search, silence):
    """The endpoint may fire at the very end; the final keeps the whole text (wenet#1657)."""
    engine = make_engine(decode_options={"search": search})
    tokens = [1, 2, 3] + [0] * silence
    for piece in (640, 2_560, 10**6):
        outputs = stream(engine, marker_audio(tokens), ON, piece)
        assert outputs[-1].text == "abc"
        assert [segment.text for segment in outputs[-1].segments] == ["abc"]
        assert len(commits(outputs)) <= 1


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("reset", ["none", "decoder"])
def test_words_are_the_same_with_endpointing_on_and_off(make_engine, search, reset):
    engine = make_engine(decode_options={"search": search}, endpoint_reset=reset)
    generator = torch.Generator().manual_seed(5)
    for _ in range(6):
        tokens: list[int] = []
        for _ in range(4):
            count = int(torch.randint(1, 12, (1,), generator=generator))
            tokens += torch.randint(0, 16, (count,), generator=generator).tolist()
            tokens += [0] * int(torch.randint(5, 70, (1,), generator=generator))
        audio = marker_audio([*tokens, 3])
        with_, without = stream(engine, audio, ON)[-1], stream(engine, audio)[-1]
        assert (with_.text, with_.tokens, with_.timestamps) == (without.text, without.tokens, without.timestamps)
        assert "".join(segment.text for segment in with_.segments) == with_.text


def test_a_long_segment_is_cut_between_tokens(make_engine):
    engine = make_engine(endpoint_rules=[{"min_segment_length": 1.0}], decode_options={"search": "greedy"})
    tokens = [1 + i % 15 for i in range(60)]  # 2.4 s without a pause
    outputs = stream(engine, marker_audio(tokens), ON)
    texts = [output.segments[0].text for output in commits(outputs)]
    assert "".join(texts) == outputs[-1].text[: len("".join(texts))]
    assert len(texts) == 2
    assert "".join(segment.text for segment in outputs[-1].segments) == outputs[-1].text == spell(tokens)


def test_off_by_default_on_per_engine_off_per_request(make_engine):
    audio = marker_audio([1, 2] + [0] * 40 + [3])
    assert commits(stream(make_engine(), audio)) == []
    engine = make_engine(endpointing=True)
    assert len(commits(stream(engine, audio))) == 1
    assert commits(stream(engine, audio, DecodingOptions(endpointing=False))) == []


def test_commits_come_also_without_partials(make_engine):
    engine = make_engine(partial_decode_interval=0, endpointing=True)
    outputs = stream(engine, marker_audio([1, 2] + [0] * 40 + [3]))
    assert [output.is_segment_final for output in outputs] == [True, True]


def test_refusals(make_engine):
    with pytest.raises(ConfigError, match="endpoint_rules"):
        make_engine(endpoint_rules=[])
    with pytest.raises(ConfigError, match="endpoint_rules"):
        make_engine(endpoint_rules=[{"silence": 3}])
    with pytest.raises(RequestRefusedError, match="endpointing=True is for streams"):
        make_engine().add_request(marker_audio([1]), streaming=False, decoding=ON)


def test_the_default_rules():
    assert DEFAULT_RULES[0] == EndpointRule(must_contain_token=False, min_trailing_silence=2.4)
    assert DEFAULT_RULES[1] == EndpointRule(must_contain_token=True, min_trailing_silence=1.2)
    assert DEFAULT_RULES[2].min_segment_length == 20.0


def test_silence_before_the_first_word_makes_no_segment():
    endpointer = Endpointer(DEFAULT_RULES, 0.04)
    assert endpointer.update(Hypotheses([Hypothesis([])], trailing_silence_frames=100), 100) is None
    assert endpointer.boundaries == []
    said = Hypotheses([Hypothesis([5], [110])], trailing_silence_frames=35, stable_tokens=1)
    commit = endpointer.update(said, 146)
    assert (commit.first, commit.last, commit.end_frame) == (0, 1, 146)


def test_real_speech_with_pauses(wenet_digits):
    clips = [
        torch.from_numpy(load_audio(wenet_digits / "test_wavs" / f"{name}.wav").samples)
        for name in ("utt09_4d", "utt16_7d")
    ]
    pause = 0.0005 * torch.randn(32_000, generator=torch.Generator().manual_seed(0))
    audio = torch.cat([clips[0], pause, clips[1], pause])
    config = EngineConfig(ckpt_dir=wenet_digits, device="cpu", dtype="float32", endpointing=True, gc_freeze=False)
    with ASREngine(config) as engine:
        outputs = stream(engine, audio, DecodingOptions(word_timestamps=True))
        off = stream(engine, audio, DecodingOptions(endpointing=False))[-1]
    final = outputs[-1]
    assert (final.text, final.tokens) == (off.text, off.tokens)
    assert len(final.segments) >= 2
    assert " ".join(segment.text for segment in final.segments) == final.text
    assert final.segments[1].start >= len(clips[0]) / 16000
    assert commits(outputs)[0].segments[0] == final.segments[0]
