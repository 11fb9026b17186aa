"""What is accepted as a waveform, what is refused and how, and batches."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from oasr_core.errors import InvalidAudioError
from oasr_core.frontend.fbank import FbankFrontend
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.options import FeatureConfig

SAMPLES = [0.0, 0.5, -0.25, 1.0]


@pytest.fixture
def processor():
    return InputProcessor(FbankFrontend(FeatureConfig(), 32768.0))


@pytest.mark.parametrize(
    "audio",
    [
        SAMPLES,
        tuple(SAMPLES),
        np.array(SAMPLES),
        np.array(SAMPLES, dtype=np.float32),
        np.array(SAMPLES, dtype=np.float16),
        np.array(SAMPLES, dtype=">f4"),
        np.array(SAMPLES, dtype=np.longdouble),
        np.array(SAMPLES)[::-1].copy()[::-1],
        np.array(SAMPLES).repeat(2)[::2],
        np.array([SAMPLES]),
        np.array([SAMPLES]).T,
        [SAMPLES],
        torch.tensor(SAMPLES),
        torch.tensor(SAMPLES, dtype=torch.float64),
        torch.tensor(SAMPLES, dtype=torch.float16),
        torch.tensor(SAMPLES, dtype=torch.bfloat16),
        torch.tensor(SAMPLES, requires_grad=True),
        torch.tensor(SAMPLES).repeat_interleave(2)[::2],
        torch.tensor([SAMPLES]),
        torch.tensor([SAMPLES]).T,
    ],
)
def test_accepted(processor, audio):
    waveform = processor.prepare_waveform(audio)
    assert waveform.tolist() == SAMPLES
    assert waveform.dtype == torch.float32
    assert waveform.is_contiguous()
    assert not waveform.requires_grad


@pytest.mark.parametrize("audio", [[], np.zeros(0), np.zeros((1, 0)), torch.zeros(0), torch.zeros(0, 1)])
def test_no_samples_are_allowed(processor, audio):
    assert processor.prepare_waveform(audio).shape == (0,)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros(4, dtype=np.int16), "got int16; divide.*/ 32768"),
        (np.zeros(4, dtype=np.int32), "/ 2147483648"),
        (np.zeros(4, dtype=np.uint8), "- 128"),
        (np.zeros(4, dtype=np.int64), "full scale"),
        (torch.zeros(4, dtype=torch.int16), "got int16; divide.*/ 32768"),
        ([1, 2, 3], "got int64"),
        (np.zeros(4, dtype=bool), "got bool; convert"),
        (torch.zeros(4, dtype=torch.bool), "got bool; convert"),
        (np.zeros(4, dtype=complex), "complex128"),
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
        (torch.zeros(4).to_sparse(), "dense"),
        (torch.zeros(4, device="meta"), "dense"),
        (np.array(["a"]), "<U1"),
        (["0.5"], "<U3"),
        ([None], "object"),
        ([[0.1], [0.1, 0.2]], "flat sequence"),
        (np.zeros((2, 4)), r"got \(2, 4\); choose a channel"),
        (torch.zeros(4, 2), r"got \(4, 2\); choose a channel"),
        (np.zeros((0, 4)), r"got \(0, 4\)"),
        (np.zeros((1, 1, 4)), r"got \(1, 1, 4\)"),
        (torch.tensor(0.5), r"got \(\)"),
        ("audio.wav", "load_audio"),
        (b"\0\0", "frombuffer"),
        (None, "NoneType"),
        (0.5, "got float"),
        ({0: 0.5}, "got dict"),
    ],
)
def test_refused(processor, audio, message):
    with pytest.raises(InvalidAudioError, match=message):
        processor.prepare_waveform(audio)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_the_first_bad_sample_is_named(processor, value, make):
    samples = [0.0] * 16000
    samples[12000] = samples[800] = value
    with pytest.raises(InvalidAudioError, match=rf"sample 800 \(at 0\.0500 s\) is {value}; 2 of 16000"):
        processor.prepare_waveform(make(samples))


def test_what_float32_cannot_hold_is_not_finite(processor):
    with pytest.raises(InvalidAudioError, match=r"sample 1 .* is inf"):
        processor.prepare_waveform(np.array([0.0, 1e300]))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_copy_is_ours(processor, kind):
    audio = np.full(100, 0.5, dtype=np.float32) if kind == "numpy" else torch.full((100,), 0.5)
    waveform = processor.prepare_waveform(audio)
    audio[:] = 0
    assert (waveform == 0.5).all()


def test_a_wrong_scale_is_told_once(processor, caplog):
    with caplog.at_level(logging.WARNING, logger="oasr_core"):
        processor.prepare_waveform([1.4, -1.4])
        assert not caplog.records
        processor.prepare_waveform([0.1, -20000.0])
        processor.prepare_waveform([12345.0])
    assert len(caplog.records) == 1
    assert "2e+04" in caplog.text
    assert "32768" in caplog.text


def test_another_rate_is_resampled(processor):
    tone = np.sin(2 * np.pi * 440 * np.arange(48000) / 48000).astype(np.float32) / 2
    waveform = processor.prepare_waveform(tone, sample_rate=48000)
    assert waveform.shape == (16000,)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) / 2
    assert np.abs(waveform.numpy() - expected)[200:-200].max() < 1e-3
    assert torch.equal(processor.prepare_waveform(tone, sample_rate=16000), torch.from_numpy(tone))


@pytest.mark.parametrize("rate", [0, -16000, 3999, 400000, 16000.0, "16000", True])
def test_impossible_rates(processor, rate):
    with pytest.raises(InvalidAudioError, match="sample rate"):
        processor.prepare_waveform([0.0] * 100, sample_rate=rate)


def test_times_are_counted_at_the_declared_rate(processor):
    with pytest.raises(InvalidAudioError, match=r"sample 800 \(at 0\.1000 s\)"):
        processor.prepare_waveform([0.0] * 800 + [float("nan")], sample_rate=8000)


def test_a_batch(processor, speech_like):
    waveforms = [torch.from_numpy(speech_like(length, length)) for length in (16000, 100, 0, 5000)]
    features, frames = processor.extract(waveforms)
    assert frames == [98, 0, 0, 29]
    assert features.shape == (4, 98, 80)
    assert not features[3, 29:].any()
    single, (count,) = processor.extract(waveforms[3:])
    torch.testing.assert_close(features[3, :count], single[0], rtol=0, atol=4e-6)
    assert [processor.num_frames(len(waveform)) for waveform in waveforms] == frames


def test_no_rows_at_all(processor):
    features, frames = processor.extract([])
    assert features.shape == (0, 0, 80)
    assert frames == []
    features, frames = processor.extract([torch.zeros(0)])
    assert features.shape == (1, 0, 80)
    assert frames == [0]
