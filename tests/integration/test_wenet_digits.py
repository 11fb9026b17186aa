"""The trained digits checkpoint through the whole engine, from the wav, against WeNet (tolerances.md)."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import AudioTooLongError, CheckpointError, ConfigError
from oasr_core.metrics import ErrorCounts, count_errors
from oasr_core.testing.invariance import run_offline, run_streaming

MODES = {"offline": -1, "stream_c16_lall": -1, "stream_c16_l4": 4}
WER = {"offline": 0.93, "stream_c16_lall": 1.85, "stream_c16_l4": 2.78}
GREEDY = {"search": "greedy"}


@pytest.fixture(scope="module")
def make(wenet_digits):
    engines: dict[tuple, ASREngine] = {}

    def build(dtype="float32", left=-1, **settings) -> ASREngine:
        key = (dtype, left, *sorted(settings.items()))
        if key not in engines:
            values = {
                "ckpt_dir": wenet_digits,
                "device": "cpu",
                "gc_freeze": False,
                "decode_options": GREEDY,
                **settings,
            }
            engines[key] = ASREngine(EngineConfig(dtype=dtype, num_left_chunks=left, **values))
        return engines[key]

    yield build
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def oracle(wenet_digits):
    return json.loads((wenet_digits / "oracle" / "decode_results.json").read_text())


@pytest.fixture(scope="module")
def wavs(wenet_digits, oracle):
    folder = wenet_digits / "test_wavs"
    return {name: torch.from_numpy(load_audio(folder / f"{name}.wav").samples) for name in oracle["reference"]}


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_from_the_wav(make, wavs, wenet_digits, mode):
    stored = load_file(wenet_digits / "oracle" / f"{mode}.safetensors")
    names = [name for name in wavs if f"{name}.ctc_log_probs" in stored]
    assert len(names) >= 7
    engine = make(left=MODES[mode])
    clips = [wavs[name] for name in names]
    got = run_offline(engine, clips) if mode == "offline" else run_streaming(engine, clips, lambda *_: 10_000)
    for name, observation in zip(names, got, strict=True):
        want = stored[f"{name}.ctc_log_probs"]
        assert observation.log_probs.shape == want.shape
        assert (observation.log_probs - want).abs().max() <= 3e-3


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_texts_and_wer(make, wavs, oracle, mode):
    outputs = make(left=MODES[mode]).transcribe_outputs(list(wavs.values()), streaming=mode != "offline")
    for name, output in zip(wavs, outputs, strict=True):
        want = oracle["utterances"][name][mode]["ctc_greedy_search"]
        assert (output.text, output.tokens) == (want["text"], [want["tokens"]]), name
    counts = [count_errors(oracle["reference"][n].split(), o.text.split()) for n, o in zip(wavs, outputs, strict=True)]
    assert round(100 * sum(counts, ErrorCounts()).rate, 2) == WER[mode]


@pytest.mark.parametrize("mode", MODES)
def test_bf16_changes_at_most_one_transcript(make, wavs, oracle, mode, record_property):
    outputs = make("bfloat16", left=MODES[mode]).transcribe_outputs(list(wavs.values()), streaming=mode != "offline")
    want = [oracle["utterances"][name][mode]["ctc_greedy_search"]["text"] for name in wavs]
    differing = sum(output.text != text for output, text in zip(outputs, want, strict=True))
    record_property("differing_transcripts", differing)
    assert differing <= 1


def test_frames_give_word_times_on_the_audio_clock(make, wavs):
    from oasr_core.request import DecodingOptions

    options = DecodingOptions(word_timestamps=True)
    for streaming in (False, True):
        (output,) = make().transcribe_outputs([wavs["utt16_7d"]], streaming=streaming, decoding=options)
        assert [word.word for word in output.words] == output.text.split()
        times = [time for word in output.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert times[-1] <= len(wavs["utt16_7d"]) / 16000
        assert all(0 < word.confidence <= 1 for word in output.words)


def test_a_sentencepiece_model_only_adds_encoding(make, wavs, wenet_digits):
    engine = make(sentencepiece_model=str(wenet_digits / "train.bpe.model"))
    assert engine.transcribe(wavs["utt16_7d"], streaming=False) == "FIVE SIX THREE TWO NINE ONE EIGHT"
    assert engine._parts.tokenizer.encode("five six") == [38, 18, 43]


def test_feature_config_overrides_loudly(make, wavs, caplog):
    with caplog.at_level(logging.WARNING):
        engine = make(feature_config=None, audio_scale=1.0)
        assert "trained" not in caplog.text
    assert engine.transcribe(wavs["utt16_7d"], streaming=False) != "FIVE SIX THREE TWO NINE ONE EIGHT"
    with caplog.at_level(logging.WARNING):
        other = ASREngine(
            EngineConfig(
                ckpt_dir=engine.config.ckpt_dir,
                device="cpu",
                dtype="float32",
                feature_config={"window_type": "hamming"},
                gc_freeze=False,
            )
        )
    other.close()
    assert "window_type: trained 'povey', set 'hamming'" in caplog.text


def test_audio_past_the_positions_is_refused_offline(make):
    with pytest.raises(AudioTooLongError, match="the model has positions for 5000"):
        make().add_request(torch.zeros(16000 * 201), streaming=False)


def test_a_truncated_checkpoint_is_named(wenet_digits, tmp_path):
    for name in ("train.yaml", "units.txt", "global_cmvn"):
        shutil.copy(wenet_digits / name, tmp_path / name)
    (tmp_path / "final.pt").write_bytes((wenet_digits / "final.pt").read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match=r"final\.pt"):
        ASREngine(EngineConfig(ckpt_dir=tmp_path, device="cpu"))


def test_wrong_chunk_sizes_are_refused_at_construction(wenet_digits):
    with pytest.raises(ConfigError, match="chunk_size"):
        ASREngine(EngineConfig(ckpt_dir=wenet_digits, device="cpu", chunk_size=64, block_size_frames=16))


def test_an_offline_only_checkpoint_says_so(wenet_digits):
    folder = wenet_digits / "variants" / "v1_batchnorm_noncausal_old_yaml"
    with pytest.raises(ConfigError, match=r"offline only.*--mode, --chunk-size"):
        ASREngine(EngineConfig(ckpt_dir=folder, device="cpu", service_mode="streaming"))
    with ASREngine(EngineConfig(ckpt_dir=folder, device="cpu", gc_freeze=False)) as engine:
        assert not engine.can_stream
        assert isinstance(engine.transcribe(torch.zeros(16000)), str)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"num_mel_bins": 40}, "takes 80 features a frame and the settings give 40"),
        ({"lfr_m": 4}, "takes 80 features a frame and the settings give 320"),
        ({"sample_rate": 8000}, "trained at 16000 Hz and feature_config says 8000 Hz"),
    ],
)
def test_features_that_the_model_cannot_take_are_refused(wenet_digits, features, message):
    with pytest.raises(ConfigError, match=message):
        ASREngine(EngineConfig(ckpt_dir=wenet_digits, device="cpu", feature_config=features))
