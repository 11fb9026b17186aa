"""Whisper's log-mel spectrogram in windows of fixed length (``whisper_logmel``).

Periodic Hann window, frames centred on their shift with the signal mirrored at its ends, power spectrum, Slaney's mel
scale and area normalisation, ``log10`` floored eight decades below the loudest value, then ``(x + 4) / 4``. The floor
makes a frame depend on the whole signal, so nothing can be computed from a stream.

Source: OpenAI's ``whisper/audio.py``; mel scale and norm: M. Slaney, Auditory Toolbox, as in librosa's default.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from oasr_core.errors import AudioTooLongError, ConfigError
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.frontend.framing import compute_in_blocks
from oasr_core.frontend.options import WhisperLogMelOptions

# Frames computed at a time: on a CPU the intermediate results of one block stay in the cache of a core, elsewhere a
# block bounds their memory.
_CPU_BLOCK = 256
_DEVICE_BLOCK = 4096

# Energies below this are taken for this before the logarithm.
_QUIETEST = 1e-10

# Decades between the loudest value and the floor, and the same after the scaling by a quarter.
_DECADES = 8.0
_SPREAD = _DECADES / 4.0

# What the scaling makes of log10(_QUIETEST).
_SILENCE = (-10.0 + 4.0) / 4.0

# Slaney's mel scale is linear (200/3 Hz a mel) below 1000 Hz and logarithmic (27 mels to a factor 6.4) above.
_LINEAR_HERTZ = 200.0 / 3.0
_BREAK_HERTZ = 1000.0
_BREAK_MEL = _BREAK_HERTZ / _LINEAR_HERTZ
_LOG_STEP = math.log(6.4) / 27.0


class _Tables(NamedTuple):
    """Constants on one device, float32."""

    window: Tensor
    mel: Tensor


class WhisperLogMel(FeatureFrontend):
    """The log-mel spectrogram of Whisper models (and of audio language models with Whisper's encoder).

    :meth:`extract` gives whole windows, ``(batch, 3000, 80)`` by default, whatever the length of the audio. Frames
    after the audio hold what ``options.padding`` says: with ``"audio"`` the value that silence has beside this audio
    (Hugging Face, and OpenAI's ``decode``), with ``"feature"`` 0.0 (faster-whisper). The same weights give other tokens
    on many recordings, so results of the two compare only with like.

    The floor is that of the signal given. To cut windows out of one spectrogram of a whole file, as faster-whisper
    does, so that the floor is the file's in all of them::

        spectrogram = frontend.log_mel(samples)                       # (frames, mel) of any length
        features = frontend.window(spectrogram, start_frame)          # (3000, mel)
    """

    oasr_api = "1.0"
    options_cls: ClassVar[type[BaseModel]] = WhisperLogMelOptions
    options: WhisperLogMelOptions

    def __init__(self, options: BaseModel, audio_scale: float = 1.0) -> None:
        if not isinstance(options, WhisperLogMelOptions):
            raise ConfigError(f"{type(self).__name__} takes WhisperLogMelOptions, got {type(options).__name__}")
        if not (math.isfinite(audio_scale) and audio_scale > 0):
            raise ConfigError(f"audio_scale must be a positive number (Whisper: 1), got {audio_scale}")
        super().__init__(options, audio_scale)
        _check(options)
        self._window_samples = options.chunk_seconds * options.sample_rate
        #: Frames of a window.
        self.window_frames = self._window_samples // options.hop_length
        self._tables: dict[torch.device, _Tables] = {}

    @property
    def sample_rate(self) -> int:
        """Hz."""
        return self.options.sample_rate

    @property
    def feature_dim(self) -> int:
        """Mel filters."""
        return self.options.num_mel_bins

    @property
    def frame_seconds(self) -> float:
        """Seconds between frames."""
        return self.options.hop_length / self.options.sample_rate

    @property
    def window_seconds(self) -> float:
        """Seconds that every utterance is padded to."""
        return float(self.options.chunk_seconds)

    def num_frames(self, samples: int) -> int:
        """Content frames: ``samples // hop_length``, at least one where there is audio, at most a window's.

        A last piece shorter than a hop has no frame of its own; the frames before it see it.
        """
        return min(self.window_frames, self._content_frames(samples))

    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Windows ``(batch, window_frames, feature_dim)`` float32 of ``(batch, samples)``, and content frames.

        ``lengths`` are read on the host. :class:`AudioTooLongError` for a row longer than a window. A row's features
        do not depend on the batch it is in.
        """
        samples = lengths.tolist()
        if max(samples, default=0) > self._window_samples:
            seconds = max(samples) / self.sample_rate
            raise AudioTooLongError(
                f"{seconds:.1f} s of audio, the window is {self.window_seconds:.0f} s; cut the audio, or compute "
                f"log_mel() of all of it and cut that with window()"
            )
        windows = waveforms.new_empty((len(samples), self.window_frames, self.feature_dim), dtype=torch.float32)
        for target, waveform, length in zip(windows, waveforms, samples, strict=True):
            self._place(self.log_mel(waveform[:length]), target)
        counts = [self.num_frames(length) for length in samples]
        return windows, torch.tensor(counts, dtype=torch.int64, device=lengths.device)

    def log_mel(self, waveform: Tensor) -> Tensor:
        """Spectrogram of all of ``waveform``, ``(samples,)`` in [-1, 1] of any length: ``(frames, feature_dim)``.

        The floor is eight decades below the loudest value of the whole waveform. With ``padding="feature"`` there is
        one row for each content frame, ``samples // hop_length``; with ``"audio"`` there is one for each frame that a
        sample reaches into, one or two more, as long as they lie in the last window.
        """
        samples = waveform.shape[0]
        total, frames, kept = self._extent(samples)
        raw = self._raw_frames(waveform, total, frames)
        block = _CPU_BLOCK if waveform.device.type == "cpu" else _DEVICE_BLOCK
        logs = compute_in_blocks(self._compute, [raw], self.feature_dim, device=waveform.device, block=block)
        floored = torch.maximum(logs, logs.amax() - _DECADES, out=logs)
        return floored.add_(4.0).mul_(0.25)[:kept]

    def window(self, log_mel: Tensor, start_frame: int) -> Tensor:
        """The window ``(window_frames, feature_dim)`` of a file's :meth:`log_mel` from ``start_frame`` on.

        After the end of the file it is filled as ``options.padding`` says, with ``"audio"`` with the file's floor.
        ``ConfigError`` where ``start_frame`` is not in the file.
        """
        if not 0 <= start_frame < max(1, log_mel.shape[0]):
            raise ConfigError(
                f"a window starts at one of the {log_mel.shape[0]} frames of the spectrogram, got start_frame="
                f"{start_frame}; give a frame from 0 to {log_mel.shape[0] - 1}"
            )
        target = log_mel.new_empty(self.window_frames, self.feature_dim)
        self._place(log_mel, target, start_frame)
        return target

    def to(self, device: torch.device) -> FeatureFrontend:
        """Build the constant tables on ``device`` now instead of at the first use."""
        self._tables_on(torch.device(device))
        return self

    def _content_frames(self, samples: int) -> int:
        return max(samples // self.options.hop_length, int(samples > 0))

    def _extent(self, samples: int) -> tuple[int, int, int]:
        """Samples of the zero-padded signal, frames to compute, and frames of those that are the result."""
        hop, half = self.options.hop_length, self.options.n_fft // 2
        content = self._content_frames(samples)
        if self.options.padding == "feature":
            # One hop of zeros is appended; the frame centred on it counts for the floor, but is not content.
            return samples + hop, samples // hop + 1, content
        reached = -(-(samples + half) // hop) if samples else 1
        frames = min(reached, max(self.window_frames, content))
        return max(samples, self._window_samples), frames, frames

    def _raw_frames(self, waveform: Tensor, total: int, frames: int) -> Tensor:
        """``(frames, n_fft)``, a view of the signal with zeros up to ``total`` samples and mirrored at both ends."""
        hop, span = self.options.hop_length, self.options.n_fft
        half, samples = span // 2, waveform.shape[0]
        end = (frames - 1) * hop + half
        padded = waveform.new_zeros(half + max(samples, end, half + 1), dtype=torch.float32)
        signal = padded[half:]
        signal[:samples] = waveform
        if self.audio_scale != 1.0:
            signal.mul_(self.audio_scale)
        padded[:half] = signal[1 : half + 1].flip(0)
        beyond = end - total
        if beyond > 0:
            signal[total:end] = signal[total - 1 - beyond : total - 1].flip(0)
        return padded.unfold(0, span, hop)[:frames]

    def _compute(self, frames: Tensor) -> Tensor:
        """One block of raw frames ``(n, n_fft)`` to ``log10`` mel energies ``(n, feature_dim)``."""
        tables = self._tables_on(frames.device)
        parts = torch.view_as_real(torch.fft.rfft(frames * tables.window)).square_()
        return ((parts[..., 0] + parts[..., 1]) @ tables.mel).clamp_(min=_QUIETEST).log10_()

    def _place(self, log_mel: Tensor, target: Tensor, start: int = 0) -> None:
        """Write the window from frame ``start`` on into ``target`` ``(window_frames, feature_dim)``."""
        part = log_mel[start : start + self.window_frames]
        target[: part.shape[0]] = part
        rest = target[part.shape[0] :]
        if not rest.shape[0]:
            return
        if self.options.padding == "feature":
            rest.zero_()
        else:
            rest.copy_((log_mel.amax() - _SPREAD).clamp_(min=_SILENCE))

    def _tables_on(self, device: torch.device) -> _Tables:
        tables = self._tables.get(device)
        if tables is None:
            # Computed in the precision that each reference uses: its rounding shows in quiet bins (2e-5).
            precision = torch.float32 if self.options.padding == "audio" else torch.float64
            window = torch.hann_window(self.options.n_fft, periodic=True, dtype=precision)
            tables = _Tables(window.to(device, torch.float32), mel_bank(self.options).to(device, torch.float32))
            self._tables[device] = tables
        return tables


def mel_bank(options: WhisperLogMelOptions) -> Tensor:
    """Slaney's mel filters, from 0 Hz to the Nyquist frequency: ``(n_fft // 2 + 1, num_mel_bins)`` float64.

    Each is a triangle over hertz between its neighbours' centres, of area one (hence lower where it is wider).
    """
    bins = torch.arange(options.n_fft // 2 + 1, dtype=torch.float64) * (options.sample_rate / options.n_fft)
    top = _mel(options.sample_rate / 2)
    edges = _hertz(torch.linspace(0.0, top, options.num_mel_bins + 2, dtype=torch.float64))
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    position = bins.unsqueeze(1)
    triangles = torch.minimum((position - low) / (centre - low), (high - position) / (high - centre)).clamp_(min=0)
    return triangles * (2.0 / (high - low))


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HERTZ:
        return hertz / _LINEAR_HERTZ
    return _BREAK_MEL + math.log(hertz / _BREAK_HERTZ) / _LOG_STEP


def _hertz(mel: Tensor) -> Tensor:
    logarithmic = _BREAK_HERTZ * torch.exp(_LOG_STEP * (mel - _BREAK_MEL))
    return torch.where(mel < _BREAK_MEL, mel * _LINEAR_HERTZ, logarithmic)


def _check(options: WhisperLogMelOptions) -> None:
    """Refuse, as :class:`ConfigError`, settings that have no whole frames."""
    span, hop = options.n_fft, options.hop_length
    if span % 2 or not hop <= span <= 4 * hop:
        raise ConfigError(
            f"n_fft={span} with hop_length={hop}: n_fft must be even and from one to four times hop_length (400, 160)"
        )
    window = options.chunk_seconds * options.sample_rate
    if window % hop or window <= span:
        raise ConfigError(
            f"chunk_seconds={options.chunk_seconds} is {window} samples at {options.sample_rate} Hz; it must be a "
            f"multiple of hop_length={hop} and more than n_fft={span}"
        )
