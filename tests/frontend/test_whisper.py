"""Whisper's log-mel spectrogram against the oracles and against the definition written out in float64."""

from __future__ import annotations

import json
import math

import av
import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from oasr_core.errors import AudioTooLongError, ConfigError
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.options import FeatureConfig, WhisperLogMelOptions
from oasr_core.frontend.whisper import WhisperLogMel
from oasr_core.registry import registry

WINDOW = 480_000
LENGTHS = [0, 1, 39, 40, 41, 159, 160, 161, 200, 201, 319, 320, 4000, 16001, 16120]
PADDINGS = ["audio", "feature"]


def made(**options):
    return WhisperLogMel(WhisperLogMelOptions(**options))


def extract(frontend, *waveforms, fill=float("nan")):
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    batch = torch.full((len(waveforms), max(map(len, waveforms))), fill)
    for row, waveform in zip(batch, waveforms, strict=True):
        row[: len(waveform)] = torch.as_tensor(waveform)
    return frontend.extract(batch, lengths)


# --- the definition --------------------------------------------------------------------------------------------------


def bank(bins):
    """Slaney's filters, by hertz, one weight at a time: ``(bins, 201)``."""

    def hertz(mel):
        return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    top = 15 + 27 * math.log(8) / math.log(6.4)
    edges = [hertz(top * index / (bins + 1)) for index in range(bins + 2)]
    weights = np.zeros((bins, 201))
    for m in range(bins):
        low, centre, high = edges[m : m + 3]
        for k in range(201):
            f = 40.0 * k
            if low < f <= centre:
                weights[m, k] = (f - low) / (centre - low)
            elif centre < f < high:
                weights[m, k] = (high - f) / (high - centre)
        weights[m] *= 2 / (high - low)
    return weights


def spectrogram(samples, bins=80):
    """``(frames, bins)`` of a signal that is mirrored at both ends; the frame after the last whole hop is dropped."""
    signal = np.pad(np.asarray(samples, dtype=np.float64), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    starts = range(0, 160 * (len(samples) // 160), 160)
    power = np.array([np.abs(np.fft.rfft(signal[start : start + 400] * window)) ** 2 for start in starts])
    logs = np.log10(np.maximum(power @ bank(bins).T, 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, torch.as_tensor(np.asarray(expected), dtype=torch.float32), rtol=0, atol=atol)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("samples", LENGTHS)
def test_audio_padding_is_the_spectrogram_of_the_padded_audio(speech_like, samples, bins):
    waveform = speech_like(samples, samples)
    frontend = made(chunk_seconds=2, num_mel_bins=bins)
    windows, counts = extract(frontend, waveform)
    close(windows[0], spectrogram(np.pad(waveform, (0, 32_000 - samples)), bins))
    assert counts.tolist() == [frontend.num_frames(samples)]


@pytest.mark.parametrize("samples", [31_700, 31_800, 31_801, 31_960, 31_999, 32_000])
def test_the_end_of_a_full_window_is_mirrored(speech_like, samples):
    waveform = speech_like(samples, samples)
    windows, _ = extract(made(chunk_seconds=2), waveform)
    close(windows[0], spectrogram(np.pad(waveform, (0, 32_000 - samples))))


@pytest.mark.parametrize("samples", [*LENGTHS, 31_999, 32_000])
def test_feature_padding_is_the_spectrogram_of_the_audio_and_zeros(speech_like, samples):
    waveform = speech_like(samples, samples)
    frontend = made(chunk_seconds=2, padding="feature")
    windows, counts = extract(frontend, waveform)
    expected = spectrogram(np.pad(waveform, (0, 160)))[: counts[0]]
    close(windows[0, : counts[0]], expected)
    assert not windows[0, counts[0] :].any()
    assert counts.tolist() == [frontend.num_frames(samples)]


def test_content_frames():
    frontend = made()
    for samples in range(2000):
        assert frontend.num_frames(samples) == (samples // 160 or min(1, samples))
    assert [frontend.num_frames(WINDOW + extra) for extra in (-1, 0, 1, WINDOW)] == [2999, 3000, 3000, 3000]


@pytest.mark.parametrize("padding", PADDINGS)
def test_silence_is_the_quietest_value(padding):
    windows, _ = extract(made(chunk_seconds=2, padding=padding), np.zeros(8000, dtype=np.float32))
    assert (windows[0, :50] == -1.5).all()
    assert (windows[0, 50:] == (-1.5 if padding == "audio" else 0.0)).all()


def test_silence_beside_speech_is_the_floor_of_the_speech(speech_like):
    windows, _ = extract(made(chunk_seconds=2), speech_like(8000))
    (floor,) = windows[0, 60:].unique()
    assert float(floor) == pytest.approx(float(windows.max()) - 2, abs=2e-7)
    longer, _ = extract(made(chunk_seconds=2), np.concatenate([speech_like(8000), np.zeros(8000, dtype=np.float32)]))
    torch.testing.assert_close(longer, windows, rtol=0, atol=4e-7)


def test_the_scale_is_multiplied_in(speech_like):
    waveform = speech_like(8000)
    scaled = WhisperLogMel(WhisperLogMelOptions(chunk_seconds=2), 0.5)
    close(extract(scaled, waveform)[0], extract(made(chunk_seconds=2), waveform * 0.5)[0], atol=1e-6)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e4])
def test_neighbours_and_what_lies_beyond_a_row_change_nothing(speech_like, padding, fill):
    frontend = made(chunk_seconds=2, padding=padding)
    waveforms = [speech_like(length, seed) for seed, length in enumerate(LENGTHS)]
    together, counts = extract(frontend, *waveforms, fill=fill)
    assert together.dtype == torch.float32
    assert together.shape == (len(LENGTHS), 200, 80)
    for waveform, batched, count in zip(waveforms, together, counts.tolist(), strict=True):
        alone, number = extract(frontend, waveform)
        assert torch.equal(alone[0], batched)
        assert count == number.item()


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_engines_way_in(speech_like, padding):
    frontend = made(chunk_seconds=2, padding=padding)
    processor = InputProcessor(frontend)
    waveforms = [processor.prepare_waveform(speech_like(length, length)) for length in (16_000, 31_000, 0, 500)]
    before = [waveform.clone() for waveform in waveforms]
    together, counts = processor.extract(waveforms)
    assert counts == [100, 193, 0, 3]
    for waveform, copy, batched in zip(waveforms, before, together, strict=True):
        (alone,), _ = processor.extract([waveform])
        assert torch.equal(alone, batched)
        assert torch.equal(waveform, copy)
    assert processor.extract([])[0].shape == (0, 200, 80)


def test_audio_longer_than_the_window_is_refused():
    frontend = made(chunk_seconds=2)
    with pytest.raises(AudioTooLongError, match=r"2\.0 s of audio, the window is 2 s; cut the audio, or compute log_"):
        frontend.extract(torch.zeros(2, 32_001), torch.tensor([5, 32_001]))
    assert frontend.extract(torch.zeros(2, 32_001), torch.tensor([5, 32_000]))[0].shape == (2, 200, 80)


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("samples", [32_001, 70_100, 96_000])
def test_windows_of_a_file_share_its_floor(speech_like, padding, samples):
    waveform = speech_like(samples)
    waveform[40_000:] *= 1e-3
    frontend = made(chunk_seconds=2, padding=padding)
    whole = frontend.log_mel(torch.from_numpy(waveform))
    end = 160 if padding == "feature" else 32_000
    expected = spectrogram(np.pad(waveform, (0, end)))[: len(whole)]
    # With "audio" and several windows the end of the file is mirrored, not followed by zeros.
    inside = samples // 160 - 2
    close(whole[:inside], expected[:inside])
    assert len(whole) - samples // 160 in ((0,) if padding == "feature" else (0, 1, 2))
    for start in (0, 100, 199, len(whole) - 1):
        window = frontend.window(whole, start)
        held = min(200, len(whole) - start)
        assert window.shape == (200, 80)
        assert torch.equal(window[:held], whole[start : start + held])
        filled = 0.0 if padding == "feature" else max(float(whole.max()) - 2, -1.5)
        assert (window[held:] == filled).all()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("samples", [0, 100, 16_000, 31_990, 32_000])
def test_a_file_of_one_window_is_what_extract_gives(speech_like, padding, samples):
    frontend = made(chunk_seconds=2, padding=padding)
    waveform = torch.from_numpy(speech_like(samples))
    assert torch.equal(frontend.window(frontend.log_mel(waveform), 0), extract(frontend, waveform)[0][0])


@pytest.mark.parametrize("start", [-1, 100])
def test_a_window_starts_in_the_file(speech_like, start):
    frontend = made(padding="feature")
    with pytest.raises(ConfigError, match=rf"one of the 100 frames .* start_frame={start}; give a frame from 0 to 99"):
        frontend.window(frontend.log_mel(torch.from_numpy(speech_like(16_000))), start)


# --- oracles ---------------------------------------------------------------------------------------------------------

CONVENTIONS = {"fw": "feature", "hf": "audio"}
CLIPS = ["arctic_a0024.wav", "librispeech-1995-1837-0001.wav", "librispeech-2412-153948-0000.flac"]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("file", CLIPS)
def test_features_of_the_tiny_en_oracle(shared_fixtures, file, convention):
    samples, rate = soundfile.read(shared_fixtures / "audio" / file, dtype="float32")
    assert rate == 16_000
    oracle = shared_fixtures / "whisper_tiny_en" / "oracle" / file.partition(".")[0]
    expected = load_file(oracle.with_suffix(".safetensors"))[f"{convention}.features"]
    (facts,) = json.loads(oracle.with_suffix(".json").read_text())["conventions"][convention]
    windows, counts = extract(made(padding=CONVENTIONS[convention]), samples)
    assert counts.tolist() == [facts["content_frames"]]
    assert windows.shape == (1, 3000, 80)
    # float16 in the file: half a unit in the last place of values below 2.
    close(windows[0, : expected.shape[1]], expected.float().T, atol=2e-5 if expected.dtype == torch.float32 else 5.1e-4)
    assert float(windows.max()) == pytest.approx(facts["feature_max"], abs=2e-6)
    rest = windows[0, expected.shape[1] :]
    close(rest, torch.full_like(rest, facts["pad_value"]), atol=2e-6)


def test_features_of_the_multilingual_oracle(shared_fixtures):
    clips = [shared_fixtures / "audio" / name for name in ("arctic_a0024.wav", "harvard_spk1_snt1.wav")]
    waveforms = [soundfile.read(path, dtype="float32")[0] for path in clips]
    expected = load_file(shared_fixtures / "hf_tiny" / "whisper_multilingual" / "oracle.safetensors")
    windows, _ = extract(made(), *waveforms)
    close(windows[:, :400], expected["input_features_first400"].transpose(1, 2))


def decoded(path):
    """16 kHz samples as FFmpeg resamples them, which the oracles were made from."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
    with av.open(str(path)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    frames += resampler.resample(None)
    return torch.from_numpy(np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.float32) / 32768)


def test_both_windows_of_a_long_clip(shared_fixtures):
    oracle = shared_fixtures / "whisper_tiny_en" / "oracle" / "osr_us_000_0034_8k.json"
    facts = json.loads(oracle.read_text())
    expected = load_file(oracle.with_suffix(".safetensors"))
    waveform = decoded(shared_fixtures / "audio" / "osr_us_000_0034_8k.wav")
    assert len(waveform) == facts["num_samples_16k"]
    # faster-whisper: windows of one spectrogram, under the floor of the file.
    frontend, windows = made(padding="feature"), facts["conventions"]["fw"]
    whole = frontend.log_mel(waveform)
    assert whole.shape[0] == sum(window["content_frames"] for window in windows)
    cut = [frontend.window(whole, window["start_frame"]) for window in windows]
    close(cut[0], expected["fw.features"].float().T, atol=5.1e-4)  # float16 in the file
    assert not cut[1][windows[1]["content_frames"] :].any()
    assert float(cut[1][: windows[1]["content_frames"]].min()) == pytest.approx(windows[0]["feature_max"] - 2, abs=1e-6)
    check_loudest(cut, windows)
    # Hugging Face: the audio is cut, each piece has its own floor.
    windows = facts["conventions"]["hf"]
    pieces, counts = extract(made(), waveform[:WINDOW], waveform[WINDOW:])
    assert counts.tolist() == [window["content_frames"] for window in windows]
    close(pieces[0], expected["hf.features"].float().T, atol=5.1e-4)
    assert float(pieces[1, -1, 0]) == pytest.approx(windows[1]["pad_value"], abs=2e-6)
    check_loudest(pieces, windows)


def check_loudest(features, facts):
    for window, fact in zip(features, facts, strict=True):
        assert float(window.max()) == pytest.approx(fact["feature_max"], abs=2e-6)


# --- settings --------------------------------------------------------------------------------------------------------


def test_registered_and_facts():
    frontend = registry("frontends").get("whisper_logmel").from_options({"num_mel_bins": 128}, 1.0)
    assert isinstance(frontend, WhisperLogMel)
    assert (frontend.sample_rate, frontend.feature_dim, frontend.frame_seconds) == (16_000, 128, 0.01)
    assert (frontend.window_seconds, frontend.window_frames, frontend.framing) == (30.0, 3000, None)
    assert frontend.to(torch.device("cpu")) is frontend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_mel_bin": 80}, "Did you mean 'num_mel_bins'"),
        ({"padding": "zero"}, "padding='zero'"),
        ({"sample_rate": 0}, "sample_rate=0"),
        ({"n_fft": 401}, "n_fft=401"),
        ({"n_fft": 100}, "n_fft=100"),
        ({"n_fft": 642}, "n_fft=642"),
        ({"hop_length": 161}, "n_fft=400|hop_length=161"),
        ({"sample_rate": 400, "chunk_seconds": 1, "hop_length": 100}, r"chunk_seconds=1 is 400 samples"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        WhisperLogMel.from_options(options, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_the_scale_is_positive(scale):
    with pytest.raises(ConfigError, match="audio_scale"):
        WhisperLogMel(WhisperLogMelOptions(), scale)


def test_other_options_are_refused():
    with pytest.raises(ConfigError, match="FeatureConfig"):
        WhisperLogMel(FeatureConfig())
