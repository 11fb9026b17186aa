"""OpenAI's tiny.en against CTranslate2, transformers and faster-whisper (``whisper_tiny_en/ORACLE.md``)."""

from __future__ import annotations

import statistics

import pytest
import torch

from oasr_core.request import DecodingOptions

pytestmark = pytest.mark.slow

#: Recordings at 16 kHz: features, and so ids, do not depend on a resampler.
EXACT = ("arctic_a0024", "librispeech-1995-1837-0001", "librispeech-2412-153948-0000")
RESAMPLED = ("osr_us_000_0034_8k", "jfk_44k_stereo")
PADDING = {"hf": "audio", "fw": "feature"}
WAYS = {
    "ct2_greedy_notimestamps": (1, False),
    "ct2_greedy_timestamps": (1, True),
    "ct2_beam5_notimestamps": (5, False),
    "ct2_beam5_timestamps": (5, True),
}


@pytest.fixture(scope="module")
def window(tiny_en, oracle, shared_fixtures):
    """``window(clip, convention, index=0)``: the encoder's output, and what the references make of it."""
    kept = {}

    def hear(clip, convention, index=0):
        key = clip, convention, index
        if key not in kept:
            found = oracle(clip)
            entry = found["conventions"][convention][index]
            path = shared_fixtures / "audio" / found["file"]
            out = tiny_en.hear(path, padding=PADDING[convention], start=entry["start_frame"])
            assert int(out.lengths[0]) == (entry["content_frames"] + 1) // 2
            kept[key] = out, entry
        return kept[key]

    return hear


@pytest.mark.parametrize("convention", PADDING)
@pytest.mark.parametrize("clip", EXACT)
def test_greedy_tokens_and_their_log_posteriors(tiny_en, window, clip, convention):
    out, expected = window(clip, convention)
    (hyps,) = tiny_en.strategy(no_speech_gate=False).decode_offline(out, [DecodingOptions()])
    best, wanted = hyps.best, expected["greedy_notimestamps"]
    assert best.tokens == wanted["ids"]
    assert best.token_log_probs == pytest.approx(wanted["logprob_masked"][: len(best.tokens)], abs=2e-3)
    assert best.score * len(best.tokens) == pytest.approx(wanted["sum_logprob_masked"], abs=5e-3)
    assert tiny_en.tokenizer.decode(best.tokens) == wanted["text"].strip()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("convention", PADDING)
@pytest.mark.parametrize("clip", EXACT)
def test_tokens_and_scores(tiny_en, window, clip, convention, way):
    beam, timestamps = WAYS[way]
    out, expected = window(clip, convention)
    strategy = tiny_en.strategy(beam_size=beam, timestamps=timestamps, no_speech_gate=False)
    (hyps,) = strategy.decode_offline(out, [DecodingOptions()])
    wanted = expected[way]
    assert hyps.best.tokens == wanted["ids"]
    assert hyps.best.score == pytest.approx(wanted["score"], abs=1e-3)
    assert hyps.no_speech_prob == pytest.approx(wanted["no_speech_prob"], abs=1e-4)
    assert hyps.language == "en"


@pytest.mark.parametrize("way", ["ct2_greedy_notimestamps", "ct2_beam5_timestamps"])
@pytest.mark.parametrize("clip", RESAMPLED)
def test_resampled_recordings_say_nearly_the_same(tiny_en, window, clip, way):
    beam, timestamps = WAYS[way]
    out, expected = window(clip, "fw")
    strategy = tiny_en.strategy(beam_size=beam, timestamps=timestamps)
    (hyps,) = strategy.decode_offline(out, [DecodingOptions()])
    said = tiny_en.tokenizer.decode(hyps.best.tokens).split()
    wanted = expected[way]["text"].split()
    assert len(said) == len(wanted)
    assert sum(a != b for a, b in zip(said, wanted, strict=True)) <= 1


@pytest.mark.parametrize("kv_storage", ["dense", "paged"])
def test_clips_together_say_what_they_say_alone(tiny_en, window, kv_storage):
    outs = [window(clip, "hf") for clip in (*EXACT, *RESAMPLED)]
    together = type(outs[0][0])(torch.cat([out.hidden for out, _ in outs]), torch.cat([out.lengths for out, _ in outs]))
    strategy = tiny_en.strategy(kv_storage=kv_storage)
    for (_, expected), hyps in zip(outs, strategy.decode_offline(together, [DecodingOptions()] * 5), strict=True):
        if expected["greedy_notimestamps"]["ids"] != hyps.best.tokens:
            assert expected in [entry for _, entry in outs[len(EXACT) :]]


@pytest.mark.parametrize(("beam", "key"), [(1, "fw_transcribe_beam1_words"), (5, "fw_transcribe_beam5_words")])
def test_word_and_segment_times(tiny_en, oracle, window, beam, key):
    options = DecodingOptions(word_timestamps=True)
    outputs, differences = tiny_en.outputs(), []
    for clip in (*EXACT, "jfk_44k_stereo"):
        out, _ = window(clip, "fw")
        strategy = tiny_en.strategy(beam_size=beam, timestamps=True, no_speech_gate=False)
        (hyps,) = strategy.decode_offline(out, [options])
        seconds = float(out.lengths[0]) * 0.02
        final = outputs.final("r", hyps, options, finish_reason="stop", duration=seconds)
        segments = [each for each in oracle(clip)[key] if each["seek"] == 0]
        assert [segment.text for segment in final.segments] == [each["text"].strip() for each in segments]
        found = [word for segment in final.segments for word in segment.words]
        wanted = [word for each in segments for word in each["words"]]
        assert [word.word for word in found] == [word["word"].strip() for word in wanted]
        assert final.words == found
        for word, expected in zip(found, wanted, strict=True):
            differences += [abs(word.start - expected["start"]), abs(word.end - expected["end"])]
        for segment, expected in zip(final.segments, segments, strict=True):
            assert (segment.start, segment.end) == pytest.approx((expected["start"], expected["end"]), abs=0.0201)
    assert max(differences) <= 0.0201
    assert statistics.median(differences) <= 0.001


def test_word_times_without_timestamps(tiny_en, oracle, window):
    """The same words, aligned as one segment: near to those of the segments."""
    options = DecodingOptions(word_timestamps=True)
    out, _ = window("librispeech-2412-153948-0000", "fw")
    (hyps,) = tiny_en.strategy().decode_offline(out, [options])
    final = tiny_en.outputs().final("r", hyps, options, finish_reason="stop", duration=11.0)
    segments = oracle("librispeech-2412-153948-0000")["fw_transcribe_beam1_words"]
    wanted = {word["word"].strip(): word for each in segments for word in each["words"]}
    pairs = [(word, wanted[word.word]) for word in final.words if word.word in wanted]
    assert len(pairs) > 20
    assert statistics.median(abs(word.start - each["start"]) for word, each in pairs) <= 0.06


@pytest.mark.parametrize("clip", EXACT)
def test_whole_windows_are_accounted_for(tiny_en, window, clip):
    out, _ = window(clip, "fw")
    (hyps,) = tiny_en.strategy(timestamps=True).decode_offline(out, [DecodingOptions()])
    assert hyps.consumed_seconds is None


def test_long_audio_goes_on_at_the_last_pair(tiny_en, window):
    out, expected = window("osr_us_000_0034_8k", "fw")
    (hyps,) = tiny_en.strategy(timestamps=True).decode_offline(out, [DecodingOptions()])
    first, second = expected["ct2_greedy_timestamps"]["ids"][-2:]
    assert first == second
    begin = tiny_en.model.interfaces["aed"].tokens.timestamp_begin
    assert hyps.consumed_seconds == pytest.approx((first - begin) * 0.02)
    assert hyps.segments[-1].start == hyps.consumed_seconds


def test_noise_is_silence(tiny_en):
    frontend = tiny_en.frontends["audio"]
    noise = 0.03 * torch.randn(80000, generator=torch.Generator().manual_seed(0))
    out = tiny_en.encode(frontend.window(frontend.log_mel(noise), 0)[None], [500])
    (gated,) = tiny_en.strategy().decode_offline(out, [DecodingOptions()])
    (invented,) = tiny_en.strategy(no_speech_gate=False).decode_offline(out, [DecodingOptions()])
    assert gated.best.tokens == []
    assert invented.best.tokens
    assert gated.no_speech_prob == invented.no_speech_prob > 0.6


def test_repetition_is_decoded_warmer(tiny_en):
    """A steady tone makes the model say the same syllable to the end."""
    frontend = tiny_en.frontends["audio"]
    tone = 0.3 * torch.sin(2 * torch.pi * 440 / 16000 * torch.arange(80000))
    out = tiny_en.encode(frontend.window(frontend.log_mel(tone), 0)[None], [500])
    (stuck,) = tiny_en.strategy().decode_offline(out, [DecodingOptions()])
    assert stuck.reached_cap
    fallback = {"temperature_fallback": (0.4, 1.0), "best_of": 2, "max_new_tokens": 40}
    (warmer,) = tiny_en.strategy(**fallback).decode_offline(out, [DecodingOptions()])
    assert warmer.temperature > 0.0
    assert warmer.best.tokens != stuck.best.tokens[:40]


def test_prompts_are_heard(tiny_en, window):
    out, _ = window("arctic_a0024", "hf")
    asked = [
        DecodingOptions(),
        DecodingOptions(prompt="A letter from the north."),
        DecodingOptions(hotwords=("Willoughby",)),
    ]
    batch = type(out)(out.hidden.expand(3, -1, -1), out.lengths.expand(3))
    found = tiny_en.strategy().decode_offline(batch, asked)
    assert len({round(hyps.best.score, 3) for hyps in found}) == 3
    assert all("reports from the" in tiny_en.tokenizer.decode(hyps.best.tokens) for hyps in found)
