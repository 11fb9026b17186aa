"""Whether there is anything in a waveform that could be speech: asked before a model that invents text for silence.

Stationary sounds (noise of any colour, hum, steady tones) keep their level in every frequency band; speech rises by
tens of decibels within a fraction of a second. The *rise* is measured: frames of 25 ms, their energies in five bands
from 200 Hz to 7.5 kHz in decibels, averaged over 0.1 s; the largest average less the first quintile, in the band where
that difference is largest. Frames of digital silence do not count, so that silence around a steady sound is no rise.

===================================================================  ==========
what                                                                 rise, dB
===================================================================  ==========
zeros, a constant, one bit of dither; single steady tones            up to 0.5
hum and rectifier buzz (50, 60, 100, 120 Hz and their harmonics)     up to 2.1
chords and dialling tones, 60 tones at once                          up to 2.2
white noise between 0 and 4 kHz, upsampled                           up to 3.1
white, pink and brown noise of 2 s to 600 s, also with hum           up to 5.2
half-second pieces of white, pink and brown noise (9000)             up to 6.5
threshold (:data:`THRESHOLD_DB`)                                     7
half-second pieces of speech in white noise 10 dB below (7360)       7.7 and up
half-second pieces of speech                                         14.0 and up
whole recordings of speech at -40 dB gain                            17.4 and up
whole recordings of speech in white noise 10 dB below                22.0 and up
whole recordings of speech                                           30.0 and up
===================================================================  ==========

(20 recordings of 1.5 s to 44 s in English and Mandarin, telephone to studio, and 20 of spoken digits; pieces that hold
at least a quarter of their recording's mean power.) What is doubtful counts as speech: sounds that come and go, such as
music, knocks, wind, signal tones in noise, noise of a few Hz bandwidth, two tones within 8 Hz that beat, or a train of
pulses at 40 Hz.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from oasr_core.segmenters.base import Segmenter, SpeechSpan

#: Rise, in decibels, from which on a waveform may hold speech.
THRESHOLD_DB = 7.0

#: Harmonics of 50 Hz and 60 Hz complete whole periods in the four frames that are averaged.
_FRAME_SECONDS = 0.025
_AVERAGED_FRAMES = 4
_BAND_EDGES_HZ = (200.0, 600.0, 1200.0, 2400.0, 4000.0, 7500.0)
#: Added to the mean square of each band: -100 dB of full scale, the level of one bit of 16-bit dither.
_FLOOR = 1e-10
#: Added as well, times the mean square of the whole: what is 50 dB weaker than that may be leakage of other bands.
_LEAKAGE = 1e-5
#: Share of the frames that are quieter than the background.
_BACKGROUND_SHARE = 0.2
#: A piece of fewer frames (0.3 s) is too short to be judged by its changes; one of fewer than these (0.1 s) for a word.
_JUDGED_FRAMES, _LEAST_FRAMES = 12, 4


class SilenceGate:
    """Decides from the waveform alone, in about 1 ms for 30 s of audio on one core."""

    def is_silent(self, waveform: Tensor, sample_rate: int) -> bool:
        """Whether ``waveform`` ``(samples,)`` float32 in [-1, 1] at ``sample_rate`` Hz certainly holds no speech."""
        return speech_rise(waveform, sample_rate) < THRESHOLD_DB


class SegmenterGate(SilenceGate):
    """Decides by a segmenter: silent is what it finds no speech in."""

    def __init__(self, segmenter: Segmenter) -> None:
        self.segmenter = segmenter

    def is_silent(self, waveform: Tensor, sample_rate: int) -> bool:
        """Whether the segmenter finds no speech; ``sample_rate`` is the rate that it was built for."""
        return not self.segmenter.speech(waveform)


class GatedSegmenter(Segmenter):
    """Base of segmenters that cut without a detector of speech: all of a waveform is speech, unless it is silent."""

    def speech(self, waveform: Tensor) -> list[SpeechSpan]:
        """One span over the whole waveform; none where :class:`SilenceGate` hears nothing."""
        samples = int(waveform.shape[0])
        if samples == 0 or SilenceGate().is_silent(waveform, self.sample_rate):
            return []
        return [SpeechSpan(0, samples)]


def speech_rise(waveform: Tensor, sample_rate: int) -> float:
    """The rise, in decibels, that the module's text describes; infinite where the piece is too short to be judged, and
    0 where it is too short for a word.
    """
    levels = _band_levels(waveform.detach().float(), sample_rate)
    live = (levels > 2 * _FLOOR).any(dim=1)
    count = int(live.sum())
    if count == 0 or levels.shape[0] < _LEAST_FRAMES:
        return 0.0
    if levels.shape[0] < _JUDGED_FRAMES:
        return float("inf")
    if count < _AVERAGED_FRAMES:  # clicks in digital silence
        return 0.0
    decibels = (levels + _LEAKAGE * levels.sum(dim=1).mean()).log10_().mul_(10.0)
    steps = decibels.shape[0] - _AVERAGED_FRAMES + 1
    averages = sum((decibels[i : i + steps] for i in range(1, _AVERAGED_FRAMES)), decibels[:steps]) / _AVERAGED_FRAMES
    middle = _AVERAGED_FRAMES // 2
    averages = averages[live[middle : middle + steps]]
    if averages.shape[0] == 0:
        return float("inf")
    background = averages.kthvalue(max(int(_BACKGROUND_SHARE * averages.shape[0]), 1), dim=0).values
    return float((averages.amax(dim=0) - background).max())


def _band_levels(waveform: Tensor, sample_rate: int) -> Tensor:
    """Mean squares ``(frames, bands)`` of the bands, above the floor."""
    window, bands = _tables(sample_rate)
    size = window.shape[0]
    frames = waveform.shape[0] // size
    if frames == 0:  # shorter than a frame: its samples and zeros
        waveform, frames = torch.nn.functional.pad(waveform, (0, size - waveform.shape[0])), 1
    spectra = torch.fft.rfft(waveform[: frames * size].view(frames, size) * window)
    return (torch.view_as_real(spectra).flatten(1).square_() @ bands).add_(_FLOOR)


@lru_cache(maxsize=8)
def _tables(sample_rate: int) -> tuple[Tensor, Tensor]:
    """Window ``(size,)``, and what sums squared real and imaginary parts to bands, ``(2 * bins, bands)``."""
    size = round(_FRAME_SECONDS * sample_rate)
    window = torch.hann_window(size)
    frequencies = torch.arange(size // 2 + 1) * (sample_rate / size)
    columns = [
        ((frequencies >= low) & (frequencies < high)).float()
        for low, high in pairwise(_BAND_EDGES_HZ)
        if low < sample_rate / 2
    ]
    bands = torch.stack(columns, dim=1).repeat_interleave(2, dim=0) * (2.0 / size)
    return window / window.square().sum().sqrt(), bands
