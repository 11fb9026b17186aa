"""Kaldi's constant tables: windows, the mel bank, the cosine transform, the lifter (float64, built once).

Source: Kaldi ``feat/feature-window.cc``, ``feat/mel-computations.cc``, ``matrix/matrix-functions.cc``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oasr_core.errors import ConfigError
from oasr_core.frontend.options import FeatureConfig

#: What energies are floored at before the logarithm: float32's epsilon.
EPSILON = 1.1920928955078125e-07


def samples_of(milliseconds: float, sample_rate: int) -> int:
    """Whole samples in ``milliseconds``, rounded down."""
    return int(sample_rate * milliseconds / 1000)


def fft_size(span: int, options: FeatureConfig) -> int:
    """Length of the FFT for frames of ``span`` samples."""
    return 1 << (span - 1).bit_length() if options.round_to_power_of_two else span


def high_frequency(options: FeatureConfig) -> float:
    """Upper edge of the mel bank in Hz; a value of zero or less counts from the Nyquist frequency."""
    return options.high_freq if options.high_freq > 0 else options.sample_rate / 2 + options.high_freq


def check_options(options: FeatureConfig, span: int, hop: int) -> None:
    """Refuse, as :class:`ConfigError`, settings from which no features can be computed."""
    nyquist, high = options.sample_rate / 2, high_frequency(options)
    if span < 2 or hop < 1:
        raise ConfigError(
            f"frame_length_ms={options.frame_length_ms} and frame_shift_ms={options.frame_shift_ms} are {span} and "
            f"{hop} samples at {options.sample_rate} Hz; a frame needs at least 2 and a shift 1: use larger values"
        )
    if fft_size(span, options) % 2:
        raise ConfigError(
            f"frame_length_ms={options.frame_length_ms} is {span} samples at {options.sample_rate} Hz, an odd FFT "
            f"length; set round_to_power_of_two=True or a length with an even number of samples"
        )
    if not 0 <= options.low_freq < high <= nyquist:
        raise ConfigError(
            f"the mel bank would run from low_freq={options.low_freq} to {high} Hz (high_freq={options.high_freq}); "
            f"at {options.sample_rate} Hz the edges must satisfy 0 <= low < high <= {nyquist:g}"
        )


def window(kind: str, span: int) -> Tensor:
    """Window function ``(span,)``, symmetric (both ends are equal)."""
    phase = 2 * math.pi / (span - 1) * torch.arange(span, dtype=torch.float64)
    match kind:
        case "povey":
            return (0.5 - 0.5 * phase.cos()).clamp_(min=0).pow(0.85)
        case "hanning":
            return 0.5 - 0.5 * phase.cos()
        case "hamming":
            return 0.54 - 0.46 * phase.cos()
        case "blackman":
            return 0.42 - 0.5 * phase.cos() + 0.08 * (2 * phase).cos()
        case "rectangular":
            return torch.ones(span, dtype=torch.float64)
    raise ConfigError(f"window_type {kind!r} is unknown; known: povey, hamming, hanning, blackman, rectangular")


def mel_scale(hertz: Tensor) -> Tensor:
    """Mel of a frequency, ``1127 ln(1 + f / 700)``."""
    return 1127.0 * torch.log1p(hertz / 700.0)


def mel_bank(options: FeatureConfig, size: int) -> Tensor:
    """Triangles, linear in mel, over the bins of a real FFT of ``size``: ``(size // 2 + 1, num_mel_bins)``.

    The Nyquist bin has no weight, because no triangle reaches beyond it. A bank so fine that a triangle lies between
    two FFT bins leaves that column zero.
    """
    hertz = torch.arange(size // 2 + 1, dtype=torch.float64) * (options.sample_rate / size)
    edges = mel_scale(torch.tensor([options.low_freq, high_frequency(options)], dtype=torch.float64))
    step = (edges[1] - edges[0]) / (options.num_mel_bins + 1)
    left = edges[0] + step * torch.arange(options.num_mel_bins, dtype=torch.float64)
    position = (mel_scale(hertz).unsqueeze(1) - left) / step
    return torch.minimum(position, 2.0 - position).clamp_(min=0)


def cosine_transform(options: FeatureConfig) -> Tensor:
    """Orthonormal DCT-II with the cepstral lifter in it: ``(num_mel_bins, num_ceps)``."""
    bins, ceps = options.num_mel_bins, options.num_ceps
    if ceps > bins:
        raise ConfigError(f"num_ceps={ceps} is more than num_mel_bins={bins}; use at most {bins}")
    order = torch.arange(ceps, dtype=torch.float64)
    place = torch.arange(bins, dtype=torch.float64).unsqueeze(1) + 0.5
    table = math.sqrt(2.0 / bins) * torch.cos(math.pi / bins * place * order)
    table[:, 0] = math.sqrt(1.0 / bins)
    if options.cepstral_lifter > 0:
        table *= 1.0 + 0.5 * options.cepstral_lifter * torch.sin(math.pi * order / options.cepstral_lifter)
    return table
