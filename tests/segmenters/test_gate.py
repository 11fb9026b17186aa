"""The silence gate: what is stationary is silent, what may be speech is not."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_core.segmenters.gate import THRESHOLD_DB, SegmenterGate, SilenceGate, speech_rise
from oasr_core.segmenters.quiet import QuietOptions, QuietSegmenter

RATE = 16000
#: The table in the gate's docstring: the largest rise of noise, and the smallest of speech.
MOST_OF_NOISE_DB, LEAST_OF_NOISY_PIECES_DB, LEAST_OF_PIECES_DB, LEAST_OF_RECORDINGS_DB = 6.5, 7.5, 13.0, 17.0


def white(seconds: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(round(seconds * RATE), generator=torch.Generator().manual_seed(seed)) * 0.1


def coloured(seconds: float, slope: float, seed: int = 0) -> torch.Tensor:
    """Noise whose power falls with the frequency to the power of ``slope``."""
    spectrum = torch.fft.rfft(white(seconds, seed))
    spectrum[1:] /= torch.arange(1, len(spectrum)) ** (slope / 2)
    spectrum[0] = 0
    noise = torch.fft.irfft(spectrum, round(seconds * RATE))
    return noise / noise.std() * 0.1


def tones(*frequencies: float, seconds: float = 10.0, weights: list[float] | None = None) -> torch.Tensor:
    clock = torch.arange(round(seconds * RATE), dtype=torch.float64) / RATE
    given = weights or [1.0] * len(frequencies)
    wave = sum(
        w * torch.sin(2 * math.pi * f * clock + i * i) for i, (f, w) in enumerate(zip(frequencies, given, strict=True))
    )
    return (wave / wave.abs().max() * 0.5).float()


def hum(base: float) -> torch.Tensor:
    return tones(*(base * k for k in range(1, 40)), weights=[1 / k for k in range(1, 40)])


def padded(sound: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(RATE), sound, torch.zeros(2 * RATE)])


STATIONARY = {
    "nothing": torch.zeros(0),
    "zeros": torch.zeros(RATE * 30),
    "a constant": torch.full((RATE * 10,), 0.3),
    "one bit of dither": (white(10) > 0).float() / 32768,
    "rare flips of one bit": ((white(10) > 0.33).long().cumsum(0) % 2).float() / 32768,
    "white noise and a constant": white(10) + 0.3,
    "coarse white noise": (white(10) * 50).round() / 50,
    "hum of 50 Hz": hum(50),
    "hum of 50.2 Hz": hum(50.2),
    "hum of 60 Hz": hum(60),
    "hum and white noise": hum(50) + white(10) * 0.03,
    "a chord": tones(261.63, 329.63, 392.0),
    "a dialling tone": tones(350, 440),
    "a key": tones(770, 1336),
    "sixty tones": tones(*(100 + 37.3 * k for k in range(60))),
    "a tone in silence": padded(tones(1000, seconds=2)),
    "white noise in silence": padded(white(2)),
    "clicks in silence": (torch.arange(RATE * 5) % RATE == 8200).float() * 0.5,
    **{f"a tone of {f} Hz": tones(f) for f in (50, 100, 250, 440, 599.6, 999.7, 1000, 2400, 3999.3, 7000)},
}


@pytest.mark.parametrize("name", STATIONARY)
def test_stationary_sounds_are_silent(name):
    for gain in (1.0, 0.01):
        assert speech_rise(STATIONARY[name] * gain, RATE) < MOST_OF_NOISE_DB
        assert SilenceGate().is_silent(STATIONARY[name] * gain, RATE)


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0], ids=["white", "pink", "brown"])
@pytest.mark.parametrize("level", [1e-4, 1.0, 9.0])
def test_noise_is_silent_at_any_length_and_level(slope, level):
    for seconds, seeds in ((0.5, 40), (3.0, 20), (30.0, 4)):
        for seed in range(seeds):
            noise = coloured(seconds, slope, seed) * level
            assert speech_rise(noise, RATE) < MOST_OF_NOISE_DB, (seconds, seed)


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0], ids=["white", "pink", "brown"])
def test_ten_minutes_of_noise_are_silent(slope):
    assert speech_rise(coloured(600.0, slope), RATE) < MOST_OF_NOISE_DB


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_noise_is_silent_at_other_rates(rate):
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        assert SilenceGate().is_silent(torch.randn(3 * rate, generator=generator) * 0.1, rate)


def test_too_short_to_be_judged_is_not_silent():
    assert not SilenceGate().is_silent(white(0.25), RATE)
    assert not SilenceGate().is_silent(white(0.1), RATE)
    assert SilenceGate().is_silent(white(0.09), RATE)  # no word is that short
    assert SilenceGate().is_silent(torch.zeros(100), RATE)


def variants(clip: torch.Tensor) -> dict[str, torch.Tensor]:
    """A recording as it is, very quiet, in noise, in silence, and with a constant."""
    noise = torch.randn(len(clip), generator=torch.Generator().manual_seed(3)) * clip.std() * 10 ** (-10 / 20)
    return {
        "plain": clip,
        "-40 dB": clip * 0.01,
        "10 dB above white noise": clip + noise,
        "in 30 s of zeros": torch.cat([torch.zeros(RATE * 15), clip, torch.zeros(RATE * 15)]),
        "with a constant": clip + 0.2,
        "with hum": clip + 0.1 * hum(50).repeat(10)[: len(clip)],
    }


def recordings(folder: Path) -> list[tuple[str, torch.Tensor]]:
    kinds = {".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus"}
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in kinds]
    assert len(paths) >= 20
    return [(path.name, torch.from_numpy(load_audio(path, sample_rate=RATE).samples.copy())) for path in paths]


def pieces(clip: torch.Tensor) -> list[torch.Tensor]:
    """Half-second pieces with at least a quarter of the recording's mean power."""
    power = clip.square().mean() / 4
    return [piece for piece in clip.split(RATE // 2) if len(piece) == RATE // 2 and piece.square().mean() > power]


def check_speech(clips: list[tuple[str, torch.Tensor]]) -> None:
    for name, clip in clips:
        for variant, audio in variants(clip).items():
            assert speech_rise(audio, RATE) > LEAST_OF_RECORDINGS_DB, (name, variant)
        for index, piece in enumerate(pieces(clip)):
            noise = torch.randn(RATE // 2, generator=torch.Generator().manual_seed(index)) * piece.std()
            assert speech_rise(piece, RATE) > LEAST_OF_PIECES_DB, (name, index)
            assert speech_rise(piece + noise * 10 ** (-10 / 20), RATE) > LEAST_OF_NOISY_PIECES_DB, (name, index)


def test_digits_are_heard(wenet_digits):
    check_speech(recordings(wenet_digits / "test_wavs"))


def test_real_recordings_are_heard(shared_fixtures):
    check_speech(recordings(shared_fixtures / "audio"))


def test_one_short_word_in_a_long_silence_is_heard(wenet_digits):
    word = torch.from_numpy(load_audio(wenet_digits / "test_wavs" / "utt00_1d.wav", sample_rate=RATE).samples.copy())
    loudest = int(word.square().unfold(0, 3200, 160).sum(1).argmax()) * 160
    for around in (torch.zeros(RATE * 60), white(60) * 0.02):
        audio = around.clone()
        audio[RATE * 31 : RATE * 31 + 3200] += word[loudest : loudest + 3200]
        assert not SilenceGate().is_silent(audio, RATE)


def test_speech_is_heard_at_other_rates(wenet_digits):
    path = wenet_digits / "test_wavs" / "utt01_1d.wav"
    for rate in (8000, 22050, 44100):
        clip = torch.from_numpy(load_audio(path, sample_rate=rate).samples.copy())
        assert speech_rise(clip, rate) > LEAST_OF_RECORDINGS_DB


def test_the_threshold_lies_between():
    assert MOST_OF_NOISE_DB < THRESHOLD_DB < LEAST_OF_NOISY_PIECES_DB


def test_the_gate_by_a_segmenter():
    gate = SegmenterGate(QuietSegmenter(QuietOptions(), RATE))
    assert gate.is_silent(white(5), RATE)
    beeps = tones(440) * (torch.arange(RATE * 10) // 3200 % 2)
    assert not gate.is_silent(beeps, RATE)


@pytest.mark.slow
def test_thirty_seconds_are_judged_in_milliseconds():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        noise, best = white(30), math.inf
        for _ in range(30):
            begin = time.perf_counter()
            speech_rise(noise, RATE)
            best = min(best, time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    assert best < 0.005  # 1 ms on an idle core
