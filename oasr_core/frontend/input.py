"""The engine's way in: waveforms checked and brought into one form, features of batches and of streams."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oasr_core.audio import check_sample_rate, resample
from oasr_core.errors import InvalidAudioError
from oasr_core.frontend.base import FeatureFrontend
from oasr_core.frontend.framing import compute_in_blocks
from oasr_core.frontend.streaming import FeatureStream

logger = logging.getLogger(__name__)

#: What a waveform may be given as; :meth:`InputProcessor.prepare_waveform` says what is refused.
Waveform: TypeAlias = Tensor | NDArray[np.floating] | Sequence[float]

_Audio = TypeVar("_Audio", Tensor, NDArray[np.floating])

# Raw frames that one call of FeatureFrontend.compute_frames gets at most: 6.4 MiB at 400 samples.
_FRAMES_PER_CALL = 4096

# Float audio may overshoot after resampling or lossy coding, but not as far as this.
_LOUDEST = 1.5


class InputProcessor:
    """Checks audio and computes features with one frontend on one device."""

    def __init__(self, frontend: FeatureFrontend, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.frontend = frontend.to(self.device)
        self._warned = False

    def prepare_waveform(self, audio: Waveform, sample_rate: int | None = None) -> Tensor:
        """Canonical waveform: 1-D contiguous float32 on the CPU, in memory of its own.

        ``audio`` holds samples in [-1, 1]: a tensor, an array or a sequence of floats, 1-D, or 2-D with exactly one
        channel, ``(1, n)`` or ``(n, 1)``. float64, float16 and bfloat16 are converted; no samples at all are allowed.
        ``sample_rate`` in Hz, where it is not the frontend's, has the whole utterance resampled (extra ``audio``); a
        piece of a stream needs a :class:`oasr_core.audio.StreamResampler` instead.

        Raises :class:`InvalidAudioError` for integers (their scale would be a guess), complex or other types, several
        channels, other shapes, NaN and infinity (the first is named by index and time), or a rate out of range.
        Samples beyond 1.5 are logged once: a waveform on the scale of 16-bit integers is a known mistake.
        """
        samples = _as_float32(audio)
        rate = self.frontend.sample_rate if sample_rate is None else check_sample_rate(sample_rate)
        if samples.numel():
            low, high = (float(bound) for bound in torch.aminmax(samples))
            if not (np.isfinite(low) and np.isfinite(high)):
                raise _not_finite(samples, rate)
            self._check_scale(max(-low, high))
        if rate != self.frontend.sample_rate:
            samples = torch.from_numpy(resample(samples.numpy(), rate, self.frontend.sample_rate))
        return samples

    def num_frames(self, samples: int) -> int:
        """Exact number of feature frames of an utterance of ``samples`` samples at the frontend's rate."""
        return self.frontend.num_frames(samples)

    def extract(self, waveforms: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Features of canonical waveforms: ``(batch, frames, feature_dim)`` float32 on the device, and frame counts.

        Frames beyond a row's count are zero, or what a fixed window's padding gives.
        """
        samples = [waveform.shape[0] for waveform in waveforms]
        if len(waveforms) == 1:
            padded = waveforms[0].unsqueeze(0)
        else:
            padded = torch.zeros(len(samples), max(samples, default=0), dtype=torch.float32)
            for row, waveform in zip(padded, waveforms, strict=True):
                row[: waveform.shape[0]] = waveform
        lengths = torch.tensor(samples, dtype=torch.int64)
        features, _ = self.frontend.extract(padded.to(self.device), lengths)
        return features, [self.frontend.num_frames(count) for count in samples]

    def open_stream(self) -> FeatureStream:
        """A new stream; :class:`RequestRefusedError` where the frontend needs whole utterances."""
        return FeatureStream(self.frontend)

    def extract_streaming_batch(self, streams: Sequence[FeatureStream]) -> None:
        """Compute the pending frames of all ``streams`` together and hand each its own."""
        rows = [stream.pending_frames() for stream in streams]
        counts = [row.shape[0] for row in rows]
        if not any(counts):
            return
        flat = compute_in_blocks(
            self.frontend.compute_frames, rows, self.frontend.feature_dim, device=self.device, block=_FRAMES_PER_CALL
        )
        for stream, features in zip(streams, flat.split_with_sizes(counts), strict=True):
            stream.accept(features)

    def _check_scale(self, peak: float) -> None:
        if peak > _LOUDEST and not self._warned:
            self._warned = True
            logger.warning(
                "samples reach %.4g, but a waveform is expected in [-1, 1]; the model's own scale (%g) is applied by "
                "the frontend. Divide 16-bit samples by 32768. (Said once.)",
                peak,
                self.frontend.audio_scale,
            )


def _as_float32(audio: Waveform) -> Tensor:
    """A 1-D float32 copy of ``audio`` on the CPU."""
    if isinstance(audio, Tensor):
        if not audio.is_floating_point() or audio.layout != torch.strided or audio.is_meta:
            raise _wrong_type(str(audio.dtype).removeprefix("torch."), is_integer=_is_integer(audio))
        flat = _one_channel(audio)
        return flat.detach().to("cpu", torch.float32, copy=True).contiguous()
    if isinstance(audio, str | bytes | bytearray | memoryview) or not isinstance(audio, np.ndarray | Sequence):
        raise InvalidAudioError(
            f"a waveform is a tensor, an array or a sequence of floats, got {type(audio).__name__}; "
            f"decode files with oasr_core.audio.load_audio and 16-bit PCM bytes with "
            f"numpy.frombuffer(data, '<i2').astype('float32') / 32768"
        )
    try:
        array = np.asarray(audio)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidAudioError(f"a waveform is a flat sequence of floats; this one is not: {error}") from error
    if array.dtype.kind != "f":
        raise _wrong_type(str(array.dtype), is_integer=array.dtype.kind in "iu")
    flat_array = _one_channel(array)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite and is refused as such
        return torch.from_numpy(np.array(flat_array, dtype=np.float32, order="C", copy=True))


def _one_channel(audio: _Audio) -> _Audio:
    shape = tuple(audio.shape)
    if len(shape) == 1:
        return audio
    if len(shape) == 2 and 1 in shape:
        return audio.reshape(-1)
    hint = "reshape it to one dimension"
    if len(shape) == 2:
        hint = "choose a channel, audio[0] or audio[:, 0] (WeNet takes channel 0)"
    raise InvalidAudioError(f"a waveform has shape (samples,), (1, samples) or (samples, 1), got {shape}; {hint}")


def _is_integer(audio: Tensor) -> bool:
    return not (audio.is_floating_point() or audio.is_complex() or audio.dtype == torch.bool)


def _wrong_type(dtype: str, *, is_integer: bool) -> InvalidAudioError:
    if is_integer:
        bits = {"int8": 128, "int16": 32768, "int32": 2147483648, "uint8": None}.get(dtype, 0)
        advice = f"divide them by full scale, audio.astype('float32') / {bits or 'full scale'}"
        if bits is None:
            advice = "centre and scale them, (audio.astype('float32') - 128) / 128"
        return InvalidAudioError(f"samples are floats in [-1, 1], got {dtype}; {advice}")
    return InvalidAudioError(f"samples are dense real floats in [-1, 1], got {dtype}; convert them to float32")


def _not_finite(samples: Tensor, rate: int) -> InvalidAudioError:
    bad = (~torch.isfinite(samples)).nonzero()
    first = int(bad[0])
    return InvalidAudioError(
        f"sample {first} (at {first / rate:.4f} s) is {float(samples[first])}; {len(bad)} of {len(samples)} are "
        f"not finite; samples are finite floats in [-1, 1]: repair the recording or the code that scaled it"
    )
