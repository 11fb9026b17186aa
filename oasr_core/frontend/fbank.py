"""Kaldi's log mel filter bank and MFCC, for whole batches on any device.

A frame's features depend on that frame's samples alone. Offline extraction cuts the raw frames of all rows, streaming
cuts the new frames of all streams; both go through one function, so they agree by construction.

Source: Kaldi ``feat/feature-window.cc``, ``feature-fbank.cc``, ``feature-mfcc.cc``; stacking: FunASR's ``WavFrontend``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from oasr_core.errors import ConfigError
from oasr_core.frontend import kaldi
from oasr_core.frontend.base import FeatureFrontend, StreamingFraming
from oasr_core.frontend.framing import CentredFraming, SnipEdgesFraming, compute_in_blocks, cut_frames
from oasr_core.frontend.options import FeatureConfig

# Frames computed at a time: on a CPU the intermediate results of one block stay in the cache of a core, elsewhere a
# block is large enough to fill the device and bounds its memory (8 MiB for each intermediate result).
_CPU_BLOCK = 512
_DEVICE_BLOCK = 4096


class _Tables(NamedTuple):
    """Constants on one device, float32."""

    window: Tensor
    mel: Tensor
    cosine: Tensor | None


class KaldiFrontend(FeatureFrontend):
    """What :class:`FbankFrontend` and :class:`MfccFrontend` share; not registered itself."""

    options_cls: ClassVar[type[BaseModel]] = FeatureConfig
    options: FeatureConfig

    def __init__(self, options: BaseModel, audio_scale: float) -> None:
        if not isinstance(options, FeatureConfig):
            raise ConfigError(f"{type(self).__name__} takes a FeatureConfig, got {type(options).__name__}")
        if not (math.isfinite(audio_scale) and audio_scale > 0):
            raise ConfigError(f"audio_scale must be a positive number (WeNet 32768, icefall 1), got {audio_scale}")
        super().__init__(options, audio_scale)
        span = kaldi.samples_of(options.frame_length_ms, options.sample_rate)
        hop = kaldi.samples_of(options.frame_shift_ms, options.sample_rate)
        kaldi.check_options(options, span, hop)
        self._fft_size = kaldi.fft_size(span, options)
        self._grid: StreamingFraming = (SnipEdgesFraming if options.snip_edges else CentredFraming)(span, hop)
        self._stacked = options.lfr_m > 1 or options.lfr_n > 1
        self.framing = None if self._stacked else self._grid
        self._tables: dict[torch.device, _Tables] = {}

    @property
    def sample_rate(self) -> int:
        """Hz."""
        return self.options.sample_rate

    @property
    def feature_dim(self) -> int:
        """Width of a frame, after stacking."""
        return self._frame_dim * self.options.lfr_m

    @property
    def frame_seconds(self) -> float:
        """Seconds between frames, after stacking."""
        return self._grid.hop * self.options.lfr_n / self.sample_rate

    @property
    def _frame_dim(self) -> int:
        """Width of a frame before stacking."""
        raise NotImplementedError

    def num_frames(self, samples: int) -> int:
        """Exact number of frames of an utterance of ``samples`` samples."""
        return -(-self._grid.frames(samples, final=True) // self.options.lfr_n)

    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``(batch, frames, feature_dim)`` float32 of ``(batch, samples)`` in [-1, 1], and frame counts.

        ``lengths`` are read on the host: on the CPU that costs no synchronisation. The counts are on their device.
        """
        samples = lengths.tolist()
        counts = [self._grid.frames(length, final=True) for length in samples]
        rows = [
            cut_frames(waveform[:length], self._grid, 0, count)
            for waveform, length, count in zip(waveforms, samples, counts, strict=True)
        ]
        flat = compute_in_blocks(
            self._compute, rows, self._frame_dim, device=waveforms.device, block=self._block(waveforms.device)
        )
        features = flat.split_with_sizes(counts) if counts else ()
        if self._stacked:
            features = tuple(_stack(rows, self.options.lfr_m, self.options.lfr_n) for rows in features)
        frames = [row.shape[0] for row in features]
        return self._pad(features, flat), torch.tensor(frames, dtype=torch.int64, device=lengths.device)

    def _pad(self, features: Sequence[Tensor], flat: Tensor) -> Tensor:
        """Rows ``(n_i, feature_dim)`` as one batch, zero beyond their ends; unstacked, ``flat`` holds them already."""
        frames = [row.shape[0] for row in features]
        if not self._stacked and len(set(frames)) == 1:
            return flat.view(len(frames), frames[0], self.feature_dim)
        batch = flat.new_zeros(len(frames), max(frames, default=0), self.feature_dim)
        for target, row in zip(batch, features, strict=True):
            target[: row.shape[0]] = row
        return batch

    def compute_frames(self, frames: Tensor) -> Tensor:
        """Features of raw frames: ``(n, span)`` float32 in [-1, 1] to ``(n, feature_dim)`` on the same device."""
        if self.framing is None:
            return super().compute_frames(frames)
        return compute_in_blocks(
            self._compute, [frames], self._frame_dim, device=frames.device, block=self._block(frames.device)
        )

    def to(self, device: torch.device) -> FeatureFrontend:
        """Build the constant tables on ``device`` now instead of at the first use."""
        self._tables_on(torch.device(device))
        return self

    @staticmethod
    def _block(device: torch.device) -> int:
        return _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK

    def _tables_on(self, device: torch.device) -> _Tables:
        tables = self._tables.get(device)
        if tables is None:
            cosine = self._cosine()
            tables = _Tables(
                kaldi.window(self.options.window_type, self._grid.span).to(device, torch.float32),
                kaldi.mel_bank(self.options, self._fft_size).to(device, torch.float32),
                None if cosine is None else cosine.to(device, torch.float32),
            )
            self._tables[device] = tables
        return tables

    def _cosine(self) -> Tensor | None:
        return None

    def _compute(self, frames: Tensor) -> Tensor:
        """One block of raw frames ``(n, span)`` to ``(n, frame_dim)``."""
        raise NotImplementedError

    def _spectra(self, frames: Tensor) -> tuple[Tensor, Tensor | None]:
        """Power spectra ``(n, fft_size // 2 + 1)`` and, where energy is wanted, log energies ``(n, 1)``."""
        options, span = self.options, self._grid.span
        signal = frames * self.audio_scale
        if options.dither > 0:
            signal.add_(torch.randn_like(signal), alpha=options.dither)
        if options.remove_dc_offset:
            signal.sub_(signal.mean(dim=1, keepdim=True))
        energy = self._log_energy(signal) if options.use_energy and options.raw_energy else None
        padded = signal.new_empty(signal.shape[0], self._fft_size)
        padded[:, span:] = 0
        windowed = padded[:, :span]
        torch.sub(signal[:, 1:], signal[:, :-1], alpha=options.preemphasis, out=windowed[:, 1:])
        torch.sub(signal[:, :1], signal[:, :1], alpha=options.preemphasis, out=windowed[:, :1])
        windowed.mul_(self._tables_on(frames.device).window)
        if options.use_energy and not options.raw_energy:
            energy = self._log_energy(windowed)
        parts = torch.view_as_real(torch.fft.rfft(padded)).square_()
        return parts[..., 0] + parts[..., 1], energy

    def _log_energy(self, signal: Tensor) -> Tensor:
        """Logarithm of each row's sum of squares, floored: ``(n, span)`` to ``(n, 1)``."""
        floor = max(kaldi.EPSILON, self.options.energy_floor)
        return signal.square().sum(dim=1, keepdim=True).clamp_(min=floor).log_()


class FbankFrontend(KaldiFrontend):
    """Kaldi's log mel filter bank (``fbank``)."""

    oasr_api = "1.0"

    @property
    def _frame_dim(self) -> int:
        return self.options.num_mel_bins + self.options.use_energy

    def _compute(self, frames: Tensor) -> Tensor:
        spectra, energy = self._spectra(frames)
        if not self.options.use_power:
            spectra = spectra.sqrt_()
        mel = spectra @ self._tables_on(frames.device).mel
        if self.options.use_log_fbank:
            mel = mel.clamp_(min=kaldi.EPSILON).log_()
        return mel if energy is None else torch.cat([energy, mel], dim=1)


class MfccFrontend(KaldiFrontend):
    """Kaldi's mel frequency cepstral coefficients (``mfcc``)."""

    oasr_api = "1.0"

    def __init__(self, options: BaseModel, audio_scale: float) -> None:
        super().__init__(options, audio_scale)
        if not (self.options.use_power and self.options.use_log_fbank):
            raise ConfigError(
                "mfcc is defined over the logarithm of the power spectrum; "
                "leave use_power and use_log_fbank at True, or use the fbank frontend"
            )

    @property
    def _frame_dim(self) -> int:
        return self.options.num_ceps

    def _cosine(self) -> Tensor | None:
        return kaldi.cosine_transform(self.options)

    def _compute(self, frames: Tensor) -> Tensor:
        spectra, energy = self._spectra(frames)
        tables = self._tables_on(frames.device)
        assert tables.cosine is not None  # built by _cosine
        cepstra = (spectra @ tables.mel).clamp_(min=kaldi.EPSILON).log_() @ tables.cosine
        if energy is not None:
            cepstra[:, :1] = energy
        return cepstra


def _stack(features: Tensor, stacked: int, advance: int) -> Tensor:
    """Low frame rate: ``(frames, dim)`` to ``(ceil(frames / advance), stacked * dim)``.

    Stack ``t`` starts ``(stacked - 1) // 2`` frames before frame ``t * advance``; the first and the last frame are
    repeated beyond the ends.
    """
    total, dim = features.shape
    count = -(-total // advance)
    first = torch.arange(count, device=features.device).unsqueeze(1) * advance - (stacked - 1) // 2
    index = (first + torch.arange(stacked, device=features.device)).clamp_(min=0, max=max(0, total - 1))
    return features[index].view(count, stacked * dim)
