"""Features against what WeNet, icefall and FunASR computed, and against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file

from oasr_core.frontend.fbank import FbankFrontend, MfccFrontend
from oasr_core.frontend.options import FeatureConfig

KINDS = {"fbank": FbankFrontend, "mfcc": MfccFrontend}


def read(path):
    return soundfile.read(path, dtype="float32")[0]


def assert_close(ours, theirs, largest=2e-3, mean=5e-5):
    assert ours.shape == theirs.shape
    difference = np.abs(ours.numpy().astype(np.float64) - theirs)
    assert difference.max() <= largest
    assert difference.mean() <= mean


def test_wenet_features(wenet_digits, extract):
    frontend = FbankFrontend(FeatureConfig(), 32768.0)
    oracle = load_file(wenet_digits / "oracle" / "feats.safetensors")
    waveforms = [read(wenet_digits / "test_wavs" / f"{name}.wav") for name in oracle]
    for ours, theirs in zip(extract(frontend, *waveforms), oracle.values(), strict=True):
        assert_close(ours, theirs)


def test_icefall_features(shared_fixtures, extract):
    folder = shared_fixtures / "icefall_digits"
    frontend = FbankFrontend(FeatureConfig(high_freq=-400, snip_edges=False), 1.0)
    oracle = load_file(folder / "oracle" / "fbank.safetensors")
    waveforms = [read(folder / "test_wavs" / f"{name}.wav") for name in oracle]
    for ours, theirs in zip(extract(frontend, *waveforms), oracle.values(), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize(("key", "stacking"), [("single.fbank", {}), ("single.lfr", {"lfr_m": 7, "lfr_n": 6})])
def test_funasr_features(shared_fixtures, extract, key, stacking):
    frontend = FbankFrontend(FeatureConfig(window_type="hamming", **stacking), 32768.0)
    waveform = read(shared_fixtures / "audio" / "arctic_a0024.wav")
    (ours,) = extract(frontend, waveform)
    assert_close(ours, load_file(shared_fixtures / "hf_tiny" / "paraformer_funasr" / "oracle.safetensors")[key])


EIGHT = {"sample_rate": 8000, "num_mel_bins": 23}
SETTINGS = [
    ("fbank", {}),
    ("fbank", {"snip_edges": False}),
    ("fbank", {"high_freq": -400.0}),
    ("fbank", {"high_freq": 7000.0, "low_freq": 60.0}),
    *(("fbank", {"window_type": kind}) for kind in ("hamming", "hanning", "blackman", "rectangular")),
    ("fbank", EIGHT),
    ("fbank", {**EIGHT, "snip_edges": False, "high_freq": -200.0}),
    ("fbank", {"sample_rate": 44100, "frame_length_ms": 20.0, "round_to_power_of_two": False}),
    ("fbank", {"round_to_power_of_two": False, "num_mel_bins": 40}),
    ("fbank", {"use_energy": True}),
    ("fbank", {"use_energy": True, "raw_energy": False}),
    ("fbank", {"use_energy": True, "energy_floor": 1e10}),
    ("fbank", {"use_power": False}),
    ("fbank", {"use_log_fbank": False, "num_mel_bins": 23}),
    ("fbank", {"remove_dc_offset": False, "preemphasis": 0.0}),
    ("fbank", {"frame_length_ms": 32.0, "frame_shift_ms": 8.0}),
    ("mfcc", {"num_mel_bins": 23}),
    ("mfcc", {"num_mel_bins": 23, "use_energy": True, "snip_edges": False}),
    ("mfcc", {"num_mel_bins": 23, "use_energy": True, "raw_energy": False, "energy_floor": 1.0}),
    ("mfcc", {"num_mel_bins": 40, "num_ceps": 40, "high_freq": -400.0, "low_freq": 40.0}),
    ("mfcc", {"num_mel_bins": 23, "cepstral_lifter": 0.0, "window_type": "hamming"}),
    ("mfcc", EIGHT),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_the_definition(kaldi_reference, speech_like, extract, kind, settings):
    options = FeatureConfig(**settings)
    samples = speech_like(options.sample_rate // 4 + 37)
    (ours,) = extract(KINDS[kind](options, 32768.0), samples)
    theirs = kaldi_reference(samples, options, 32768.0, kind)
    if not options.use_log_fbank:
        theirs, ours = theirs / theirs.max(), ours / theirs.max()
    assert_close(ours, theirs, largest=1e-3 if kind == "fbank" else 5e-3, mean=5e-5)


def test_silence_is_at_the_floor(extract):
    floor = np.log(np.float32(1.1920929e-07))
    (features,) = extract(FbankFrontend(FeatureConfig(use_energy=True), 32768.0), np.zeros(4000, dtype=np.float32))
    assert features.shape == (23, 81)
    np.testing.assert_allclose(features.numpy(), floor, rtol=1e-6)


def test_dither_is_noise_of_the_given_size(extract):
    """On the model's scale, not on [-1, 1]: with dither 1 silence has the energy of unit noise."""
    frontend = FbankFrontend(FeatureConfig(dither=1.0, use_energy=True, preemphasis=0.0), 32768.0)
    (first,) = extract(frontend, np.zeros(160000, dtype=np.float32))
    (second,) = extract(frontend, np.zeros(160000, dtype=np.float32))
    assert not np.array_equal(first, second)
    assert first[:, 0].exp().mean().item() == pytest.approx(399, rel=0.05)
