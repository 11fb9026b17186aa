"""Audio files and sampling rates, at the edge: the engine itself takes waveforms only.

Decoding and resampling need the extra ``audio`` (soundfile, PyAV, soxr); each package is imported at its first use.
"""

from __future__ import annotations

import importlib
import io
import logging
import operator
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oasr_core.errors import InvalidAudioError, MissingExtraError, StreamClosedError

logger = logging.getLogger(__name__)

Samples: TypeAlias = NDArray[np.float32]
Channel: TypeAlias = int | Literal["mix"]

#: Sampling rates that are taken, Hz.
LOWEST_RATE, HIGHEST_RATE = 4000, 384000

_BLOCK_FRAMES = 1 << 18
# libsndfile gives lengths of this order for a file whose header leaves the length open.
_OPEN_LENGTH = 1 << 40
# The first page of each stream in an Ogg file begins like this.
_OGG_STREAM = b"OggS\x00\x02"
# Length of a RIFF chunk that its writer could not know; some write half of it, or that less their headers.
_UNKNOWN_LENGTH = 0xFFFFFFFF
# Bytes that a WAV file may lack of what its header declares; some writers count a header among the data.
_RIFF_SLACK = 256
# Seconds that the sound of an MP4 file may be shorter than its index says.
_MP4_SLACK = 0.5
# Share of the packets of a stream that may be damaged.
_DAMAGED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Audio:
    """One channel of decoded audio: ``samples`` ``(n,)`` float32, nominally in [-1, 1], at ``sample_rate`` Hz."""

    samples: Samples
    sample_rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return audio_seconds(len(self.samples), self.sample_rate)


def audio_seconds(samples: int, sample_rate: int) -> float:
    """Seconds that ``samples`` samples last at ``sample_rate`` Hz."""
    return samples / check_sample_rate(sample_rate)


def check_sample_rate(sample_rate: int) -> int:
    """``sample_rate`` as an int; :class:`InvalidAudioError` unless it is a whole number of Hz from 4000 to 384000."""
    try:
        rate = operator.index(sample_rate)
    except TypeError:
        rate = 0
    if isinstance(sample_rate, bool) or not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise InvalidAudioError(
            f"sample rate {sample_rate!r} is not a whole number of Hz from {LOWEST_RATE} to {HIGHEST_RATE}; "
            f"give the rate at which the audio was sampled"
        )
    return rate


def load_audio(
    source: str | os.PathLike[str] | BinaryIO, *, sample_rate: int | None = None, channel: Channel = 0
) -> Audio:
    """Decode one channel of an audio or video file.

    ``source`` is a path or a binary file object (read from where it stands to its end). soundfile reads WAV, FLAC, Ogg,
    AIFF and the like; PyAV the rest (MP3, m4a, webm, video, ...), from it the sound track that FFmpeg ranks first.
    ``channel`` is counted from 0; the default is the first, as in WeNet. ``"mix"`` is the mean of all channels, which
    suits one voice recorded by several microphones and not two voices on two channels. With ``sample_rate`` in Hz the
    result is resampled.

    Raises :class:`InvalidAudioError` for a file that is missing, empty, truncated, no audio, or has no such channel,
    with what each decoder said, and :class:`MissingExtraError` where a package is not installed. A file with a valid
    header and no samples gives none. Formats that state no length (MP3, Ogg, webm) are read as far as they go: a part
    of such a file is a valid file.
    """
    if sample_rate is not None:
        check_sample_rate(sample_rate)
    if channel != "mix" and (isinstance(channel, bool) or not isinstance(channel, int) or channel < 0):
        raise InvalidAudioError(f"channel is a number from 0 or 'mix', got {channel!r}")
    name, reopen = _opener(source)
    audio = _decode(name, reopen, channel)
    if sample_rate is None or sample_rate == audio.sample_rate:
        return audio
    return Audio(resample(audio.samples, audio.sample_rate, sample_rate), sample_rate)


def resample(samples: ArrayLike, orig: int, target: int) -> Samples:
    """Resample a whole signal ``(n,)`` from ``orig`` to ``target`` Hz (soxr, high quality); nothing at equal rates."""
    orig, target = check_sample_rate(orig), check_sample_rate(target)
    signal = _one_dimension(samples)
    if orig == target:
        return signal
    resampled: Samples = _extra("soxr", "soxr").resample(signal, orig, target)
    return resampled


class StreamResampler:
    """Resamples a stream piece by piece; the pieces together equal :func:`resample` of the whole.

    The filter looks ahead, so output lags behind input; ``push(..., last=True)`` gives the rest.
    """

    def __init__(self, orig: int, target: int) -> None:
        self.orig = check_sample_rate(orig)
        self.target = check_sample_rate(target)
        self._finished = False
        self._stream: Any = None
        if self.orig != self.target:
            self._stream = _extra("soxr", "soxr").ResampleStream(self.orig, self.target, 1, dtype="float32")

    def push(self, samples: ArrayLike, last: bool = False) -> Samples:
        """Take the next samples ``(n,)`` at ``orig`` Hz; give what is ready at ``target`` Hz, ``(m,)``, maybe empty."""
        if self._finished:
            raise StreamClosedError("audio was pushed into a resampler after its last piece")
        signal = _one_dimension(samples)
        self._finished = last
        if self._stream is None:
            return signal
        resampled: Samples = self._stream.resample_chunk(signal, last=last)
        return resampled


def _extra(module: str, package: str) -> Any:
    """Import a package of the extra ``audio``."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: the package is there and its C library is not
        raise MissingExtraError(
            f"reading or resampling audio needs the package {package}, which cannot be imported ({error}); "
            f"install the extra 'audio': pip install 'oasr-core[audio]'"
        ) from error


def _one_dimension(samples: ArrayLike) -> Samples:
    signal = np.ascontiguousarray(samples, dtype=np.float32)
    if np.ndim(samples) != 1:
        raise InvalidAudioError(f"samples have one dimension, got shape {np.shape(samples)}; choose a channel")
    return signal


def _opener(source: str | os.PathLike[str] | BinaryIO) -> tuple[str, Callable[[], BinaryIO]]:
    """The source's name for messages, and a function that opens it from the start, once for each decoder."""
    if not isinstance(source, str | os.PathLike):
        if not callable(getattr(source, "read", None)):
            raise InvalidAudioError(f"audio is read from a path or a binary file, got {type(source).__name__}")
        name = repr(getattr(source, "name", type(source).__name__))
        data = source.read()
        if not isinstance(data, bytes | bytearray):
            raise InvalidAudioError(f"{name} gives {type(data).__name__}, not bytes; open it in binary mode")
        if not data:
            if name == "'<stdin>'":
                raise InvalidAudioError("standard input gave no data; pipe a recording into it")
            raise InvalidAudioError(f"{name} is empty from where it stands; rewind it or give another")
        return name, lambda: io.BytesIO(data)
    path = os.fspath(source)
    name = repr(path)
    try:
        with open(path, "rb") as file:
            piped = None if file.seekable() else file.read()
            if piped == b"" or (piped is None and not file.read(1)):
                raise InvalidAudioError(f"{name} is empty (0 bytes); record or download it again")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, InvalidAudioError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidAudioError(f"audio file {name} cannot be opened: {reason}; check the path") from error
    return name, lambda: open(path, "rb") if piped is None else io.BytesIO(piped)


class _NotReadError(Exception):
    """soundfile does not read this file, or should not; the message says why."""


def _decode(name: str, reopen: Callable[[], BinaryIO], channel: Channel) -> Audio:
    try:
        with reopen() as file:
            return _decode_soundfile(name, file, channel)
    except _NotReadError as error:
        reason = str(error)
    av = _extra("av", "av")
    try:
        with reopen() as file:
            return _decode_av(av, name, file, channel)
    except InvalidAudioError:
        raise
    except (av.FFmpegError, ValueError) as error:
        second = getattr(error, "strerror", None) or str(error)
        raise InvalidAudioError(
            f"{name} cannot be decoded as audio (soundfile: {reason}; PyAV: {second}); "
            f"check that it is a complete audio or video file"
        ) from error


def _decode_soundfile(name: str, file: BinaryIO, channel: Channel) -> Audio:
    soundfile = _extra("soundfile", "soundfile")
    missing = _missing_riff_bytes(file)
    if missing > _RIFF_SLACK:
        raise _truncated(name, f"its header declares {missing} bytes of samples more than there are")
    chained = _is_ogg_chain(file)
    file.seek(0)
    with _open_soundfile(soundfile, file) as sound:
        # libsndfile would lose their end: it guesses the length of an MP3 file without an index from the bit rate, and
        # reads the first link of an Ogg chain.
        if chained or sound.format == "MP3":
            raise _NotReadError(f"{sound.format} of this kind is left to PyAV")
        rate = check_sample_rate(sound.samplerate)
        _check_channel(name, channel, sound.channels)
        pieces = []
        try:
            if sound.format == "OGG" and sound.seekable():
                # Unless it has sought, libsndfile gives the samples that an Opus encoder puts before the sound (its
                # pre-skip) where the first page's position is not the number of samples so far.
                sound.seek(0)
            while len(block := sound.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                pieces.append(_pick(block.T, channel))
        except soundfile.LibsndfileError as error:
            raise _truncated(name, f"reading stops with {error.error_string.strip(' .')!r}") from error
        samples = _concatenate(pieces)
        if len(samples) < sound.frames < _OPEN_LENGTH:
            raise _truncated(name, f"{len(samples)} of {sound.frames} samples can be read")
    return Audio(samples, rate)


def _open_soundfile(soundfile: Any, file: BinaryIO) -> Any:
    try:
        return soundfile.SoundFile(file)
    except soundfile.LibsndfileError as error:
        raise _NotReadError(error.error_string.strip(" .")) from error
    except TypeError as error:  # for the suffix .raw soundfile wants to be told the format of the samples
        raise _NotReadError("headerless samples") from error


def _decode_av(av: Any, name: str, file: BinaryIO, channel: Channel) -> Audio:
    # No protocol is allowed, so that a playlist or a reference inside the file opens nothing else.
    with av.open(file, options={"protocol_whitelist": ""}) as container:
        stream = container.streams.best("audio")
        if stream is None:
            kinds = ", ".join(sorted({other.type for other in container.streams})) or "nothing"
            raise InvalidAudioError(f"{name} has no audio stream, only {kinds}; give a file with sound")
        pieces = []
        rate = stream.rate
        for frame in _planar_frames(av, _decoded_frames(av, name, container, stream)):
            rate = frame.sample_rate
            planes = frame.to_ndarray()
            _check_channel(name, channel, len(planes))
            pieces.append(_pick(planes, channel))
        samples, rate = _concatenate(pieces), check_sample_rate(rate)
        if "mp4" in container.format.name and stream.duration is not None:
            declared = float(stream.duration * stream.time_base)
            if len(samples) / rate < declared - _MP4_SLACK:
                raise _truncated(name, f"{len(samples) / rate:.2f} of {declared:.2f} seconds can be read")
    return Audio(samples, rate)


def _decoded_frames(av: Any, name: str, container: Any, stream: Any) -> Iterator[Any]:
    """The stream's frames; a damaged packet is skipped, as players do, unless many are."""
    packets = damaged = 0
    for packet in container.demux(stream):
        packets += 1
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            damaged += 1
        else:
            yield from frames
    if damaged > _DAMAGED_SHARE * packets:
        raise InvalidAudioError(f"{name} is damaged: {damaged} of {packets} packets cannot be decoded; get it again")
    if damaged:
        logger.warning("%s: %d damaged packets of %d were skipped, the sound in them is lost", name, damaged, packets)


def _planar_frames(av: Any, frames: Iterator[Any]) -> Iterator[Any]:
    """Frames converted to planar float32, at the rate and in the layout of the first."""
    converter = av.AudioResampler(format="fltp")
    for frame in frames:
        yield from converter.resample(frame)
    yield from filter(None, converter.resample(None))  # a converter with nothing to do gives the None back


def _check_channel(name: str, channel: Channel, channels: int) -> None:
    if channel != "mix" and channel >= channels:
        raise InvalidAudioError(
            f"{name} has {channels} channel(s), 0 to {channels - 1}; channel {channel} does not exist"
        )


def _pick(planes: NDArray[np.float32], channel: Channel) -> Samples:
    """One channel of ``(channels, n)``, in memory of its own."""
    picked: Samples = planes.mean(axis=0, dtype=np.float32) if channel == "mix" else planes[channel].copy()
    return picked


def _concatenate(pieces: list[Samples]) -> Samples:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)


def _truncated(name: str, what: str) -> InvalidAudioError:
    return InvalidAudioError(
        f"{name} is truncated or damaged: {what}; get the whole file, or write what is left to a new one"
    )


def _missing_riff_bytes(file: BinaryIO) -> int:
    """Bytes that the ``data`` chunk of a RIFF WAVE file declares beyond the end of the file; 0 for any other file.

    libsndfile reads such a file without a word. Programs that write to a pipe cannot know the length: the largest value
    stands for that and is read to the end; of a length of 0 in an unfinished header libsndfile would read nothing.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    kind, riff_length, form = struct.unpack("<4sI4s", file.read(12).ljust(12, b"\0"))
    if kind != b"RIFF" or form != b"WAVE":
        return 0
    position = 12
    while len(head := file.read(8)) == 8:
        kind, length = struct.unpack("<4sI", head)
        position += 8
        if kind == b"data":
            if length == 0 and riff_length in (0, _UNKNOWN_LENGTH) and position < size:
                raise _NotReadError("the header was never finished")
            return 0 if length >= _UNKNOWN_LENGTH // 2 - 4096 else max(0, length - (size - position))
        position += length + length % 2
        file.seek(position)
    return 0


def _is_ogg_chain(file: BinaryIO) -> bool:
    """Whether this is an Ogg file with more than one stream, one after another or side by side."""
    file.seek(0)
    if file.read(4) != _OGG_STREAM[:4]:
        return False
    file.seek(0)
    return file.read().count(_OGG_STREAM) > 1
