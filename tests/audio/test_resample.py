"""Resampling: the pieces of a stream equal the whole, and tones keep their pitch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.audio import StreamResampler, check_sample_rate, resample
from oasr_core.errors import InvalidAudioError, StreamClosedError

RATES = [(8000, 16000), (11025, 16000), (22050, 16000), (44100, 16000), (48000, 16000), (16000, 8000), (16000, 16000)]


def noise(samples):
    return (0.1 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)


def through(orig, target, signal, size, *, empty_last):
    resampler = StreamResampler(orig, target)
    starts = range(0, len(signal), size)
    out = [
        resampler.push(signal[start : start + size], last=not empty_last and start == starts[-1]) for start in starts
    ]
    if empty_last or not len(starts):
        out.append(resampler.push(np.empty(0, np.float32), last=True))
    return np.concatenate(out)


@pytest.mark.parametrize(("orig", "target"), RATES)
@pytest.mark.parametrize("size", [1, 7, 160, 441, 4000, 50000])
@pytest.mark.parametrize("empty_last", [True, False])
def test_pieces_equal_the_whole(orig, target, size, empty_last):
    for samples in (0, 1, 2, 100, 1601, 4410):
        whole = resample(noise(samples), orig, target)
        pieces = through(orig, target, noise(samples), size, empty_last=empty_last)
        assert len(whole) == pytest.approx(samples * target / orig, abs=1)
        assert whole.dtype == pieces.dtype == np.float32
        assert pieces.shape == whole.shape
        np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(rates=st.sampled_from(RATES), sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12))
def test_ragged_pieces(rates, sizes):
    signal = noise(sum(sizes))
    resampler = StreamResampler(*rates)
    cuts = np.split(signal, np.cumsum(sizes)[:-1])
    pieces = np.concatenate([resampler.push(cut, last=i == len(cuts) - 1) for i, cut in enumerate(cuts)])
    np.testing.assert_allclose(pieces, resample(signal, *rates), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("orig", "target"), RATES)
def test_a_tone_keeps_pitch_and_level(orig, target):
    def tone(rate):
        return 0.5 * np.sin(2 * np.pi * 700 * np.arange(rate) / rate)

    np.testing.assert_allclose(resample(tone(orig), orig, target)[300:-300], tone(target)[300:-300], atol=1e-3)


def test_what_the_lower_rate_cannot_hold_is_removed():
    hiss = np.sin(2 * np.pi * 12000 * np.arange(48000) / 48000)
    assert np.abs(resample(hiss, 48000, 16000)[300:-300]).max() < 1e-3


@pytest.mark.parametrize(("orig", "target"), [(8000, 16000), (16000, 16000)])
def test_nothing_after_the_last_piece(orig, target):
    resampler = StreamResampler(orig, target)
    resampler.push(noise(100), last=True)
    with pytest.raises(StreamClosedError, match="last piece"):
        resampler.push(noise(100))


def test_one_dimension():
    for samples in (np.zeros((2, 100)), np.float32(0.5)):
        with pytest.raises(InvalidAudioError, match="one dimension"):
            resample(samples, 8000, 16000)
        with pytest.raises(InvalidAudioError, match="one dimension"):
            StreamResampler(8000, 16000).push(samples)


@pytest.mark.parametrize("rate", [0, -1, 3999, 384001, 16000.0, "16000", None, True, float("nan")])
def test_rates_out_of_range(rate):
    for call in (
        lambda: check_sample_rate(rate),
        lambda: resample(noise(10), rate, 16000),
        lambda: resample(noise(10), 16000, rate),
        lambda: StreamResampler(rate, 16000),
        lambda: StreamResampler(16000, rate),
    ):
        with pytest.raises(InvalidAudioError, match="from 4000 to 384000"):
            call()


@pytest.mark.parametrize("rate", [4000, 384000, np.int64(16000)])
def test_rates_in_range(rate):
    assert check_sample_rate(rate) == rate
    assert type(check_sample_rate(rate)) is int
