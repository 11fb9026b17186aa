"""Kaldi's features written down frame by frame in float64: slow, plain, and sharing no code with the frontends."""

from __future__ import annotations

import math

import numpy as np
import pytest

EPSILON = float(np.finfo(np.float32).eps)


def _frames(x, span, hop, snip):
    n = len(x)
    if snip:
        return [x[t * hop : t * hop + span] for t in range(max(0, (n - span) // hop + 1) if n >= span else 0)]
    frames = []
    for t in range((n + hop // 2) // hop):
        first = t * hop + hop // 2 - span // 2
        frame = []
        for i in range(first, first + span):
            while i < 0 or i >= n:
                i = -i - 1 if i < 0 else 2 * n - 1 - i
            frame.append(x[i])
        frames.append(np.array(frame))
    return frames


def _window(kind, span):
    out = []
    for i in range(span):
        c = math.cos(2 * math.pi * i / (span - 1))
        hann = max(0.0, 0.5 - 0.5 * c)
        out.append(
            {
                "hanning": hann,
                "povey": hann**0.85,
                "hamming": 0.54 - 0.46 * c,
                "rectangular": 1.0,
                "blackman": 0.42 - 0.5 * c + 0.08 * math.cos(4 * math.pi * i / (span - 1)),
            }[kind]
        )
    return np.array(out)


def _mel(hertz):
    return 1127.0 * math.log(1.0 + hertz / 700.0)


def _bank(o, size):
    high = o.high_freq if o.high_freq > 0 else o.sample_rate / 2 + o.high_freq
    low_mel, high_mel = _mel(o.low_freq), _mel(high)
    step = (high_mel - low_mel) / (o.num_mel_bins + 1)
    bank = np.zeros((o.num_mel_bins, size // 2 + 1))
    for m in range(o.num_mel_bins):
        left, centre, right = (low_mel + step * (m + k) for k in range(3))
        for k in range(size // 2):
            mel = _mel(k * o.sample_rate / size)
            if left < mel <= centre:
                bank[m, k] = (mel - left) / (centre - left)
            elif centre < mel < right:
                bank[m, k] = (right - mel) / (right - centre)
    return bank


def _features(samples, o, scale, kind):
    x = np.asarray(samples, dtype=np.float64) * scale
    span, hop = int(o.sample_rate * o.frame_length_ms / 1000), int(o.sample_rate * o.frame_shift_ms / 1000)
    size = span
    if o.round_to_power_of_two:
        size = 1
        while size < span:
            size *= 2
    window, bank = _window(o.window_type, span), _bank(o, size)
    rows = []
    for frame in _frames(x, span, hop, o.snip_edges):
        y = frame - (frame.mean() if o.remove_dc_offset else 0.0)
        raw = math.log(max(float(y @ y), EPSILON))
        z = y.copy()
        z[1:] -= o.preemphasis * y[:-1]
        z[0] -= o.preemphasis * y[0]
        z *= window
        energy = raw if o.raw_energy else math.log(max(float(z @ z), EPSILON))
        if o.energy_floor > 0:
            energy = max(energy, math.log(o.energy_floor))
        spectrum = np.abs(np.fft.rfft(z, size)) ** (2 if o.use_power else 1)
        mel = bank @ spectrum
        if o.use_log_fbank:
            mel = np.log(np.maximum(mel, EPSILON))
        if kind == "fbank":
            rows.append(np.concatenate([[energy], mel]) if o.use_energy else mel)
            continue
        ceps = []
        for k in range(o.num_ceps):
            norm = math.sqrt((1 if k == 0 else 2) / o.num_mel_bins)
            c = norm * sum(mel[m] * math.cos(math.pi / o.num_mel_bins * (m + 0.5) * k) for m in range(o.num_mel_bins))
            lifter = 1 + 0.5 * o.cepstral_lifter * math.sin(math.pi * k / o.cepstral_lifter) if o.cepstral_lifter else 1
            ceps.append(c * lifter)
        if o.use_energy:
            ceps[0] = energy
        rows.append(np.array(ceps))
    width = o.num_ceps if kind == "mfcc" else o.num_mel_bins + o.use_energy
    return np.array(rows).reshape(-1, width)


@pytest.fixture(scope="session")
def kaldi_reference():
    """``f(samples, options, scale, "fbank" | "mfcc")``: ``(frames, dim)`` float64, dither ignored."""
    return _features


@pytest.fixture(scope="session")
def speech_like():
    """``f(samples, seed)``: noise with a moving tone, float32 numpy in [-1, 1]."""

    def make(samples, seed=0):
        rng = np.random.default_rng(seed)
        t = np.arange(samples)
        tone = 0.3 * np.sin(2 * np.pi * t * (0.01 + 0.00001 * (seed + 1) * t / 10))
        return (tone + 0.05 * rng.standard_normal(samples) + 0.01).astype(np.float32)

    return make


@pytest.fixture(scope="session")
def extract():
    """``f(frontend, *waveforms, fill)``: one batch, poisoned beyond each row's end; a list of ``(frames, dim)``."""
    import torch

    def run(frontend, *waveforms, fill=float("nan")):
        lengths = torch.tensor([len(w) for w in waveforms])
        batch = torch.full((len(waveforms), max(len(w) for w in waveforms)), fill)
        for row, waveform in zip(batch, waveforms, strict=True):
            row[: len(waveform)] = torch.as_tensor(waveform)
        features, frames = frontend.extract(batch, lengths)
        assert features.dtype == torch.float32
        assert features.shape == (len(waveforms), int(frames.max()), frontend.feature_dim)
        for row, count in zip(features, frames.tolist(), strict=True):
            assert not row[count:].any()
        return [row[:count] for row, count in zip(features, frames.tolist(), strict=True)]

    return run
