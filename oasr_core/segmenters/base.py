"""The contract of the ``oasr.segmenters`` axis. A segmenter says where speech is and where long audio may be cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel
from torch import Tensor

from oasr_core.errors import ConfigError, OasrError, PluginContractError
from oasr_core.options import validated
from oasr_core.segmenters.energy import quietest

#: Silence around packed speech that a window takes in.
_MARGIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class SpeechSpan:
    """Speech from sample ``start`` to before sample ``end``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """One piece of long audio: samples ``start`` to before ``end``.

    The first ``overlap_before`` of them also end the window before.
    """

    start: int
    end: int
    overlap_before: int = 0


class SpeechStream(ABC):
    """Speech and silence of one stream, as its samples arrive."""

    @abstractmethod
    def push(self, samples: Tensor) -> None:
        """Take the next samples, ``(n,)`` float32 in [-1, 1] at the segmenter's rate, ``n`` of any size."""

    @property
    @abstractmethod
    def trailing_silence_seconds(self) -> float:
        """Seconds from the end of the last speech to the last sample; all of the audio where none was heard."""


class Segmenter(ABC):
    """Finds speech in a waveform, and cuts what is longer than a model's window.

    Waveforms are ``(samples,)`` float32 in [-1, 1] at ``sample_rate`` Hz. One instance serves many requests and keeps
    no state of theirs.
    """

    #: Class of the settings that :meth:`from_options` validates.
    options_cls: ClassVar[type[BaseModel]]
    #: Whether neighbouring windows share audio. Where they do, words that both recognized are merged; where not, a seam
    #: keeps every word on both sides.
    shares_audio: ClassVar[bool] = False
    #: Whether :meth:`open_stream` is offered.
    offers_streams: ClassVar[bool] = False

    def __init__(self, options: BaseModel, sample_rate: int) -> None:
        """Raises ``ConfigError`` for a rate (Hz) that the segmenter does not serve."""
        self.options = options
        self.sample_rate = sample_rate

    @classmethod
    def from_options(cls, options: Mapping[str, object], sample_rate: int) -> Segmenter:
        """Validate ``options`` against :attr:`options_cls` (``ConfigError`` names each bad one) and build."""
        return cls(validated(cls.options_cls, options, cls.__name__), sample_rate)

    @abstractmethod
    def speech(self, waveform: Tensor) -> list[SpeechSpan]:
        """Spans that hold speech, in order and apart from each other; none where there is only silence or noise."""

    def cut(self, waveform: Tensor, max_samples: int) -> list[Window]:
        """Windows of at most ``max_samples`` samples, in order; audio outside of them is not transcribed.

        This implementation packs as many spans of :meth:`speech` as fit into each window and leaves out what lies
        between windows, but for up to 0.2 s on both sides of each. A span longer than a window is cut at the quietest
        point of the last third of the window.
        """
        windows: list[Window] = []
        begin = end = 0
        for span in self.speech(waveform):
            if end > begin and span.end - begin > max_samples:
                windows.append(Window(begin, end))
                begin = end
            if end == begin:
                begin = span.start
            while span.end - begin > max_samples:
                seam = quietest(waveform, begin + max_samples - max_samples // 3, begin + max_samples, self.sample_rate)
                windows.append(Window(begin, seam))
                begin = seam
            end = span.end
        if end > begin:
            windows.append(Window(begin, end))
        return _widened(windows, int(waveform.shape[0]), max_samples, round(_MARGIN_SECONDS * self.sample_rate))

    def windows(self, waveform: Tensor, max_samples: int) -> list[Window]:
        """What :meth:`cut` gives; audio that fits whole is one window. ``PluginContractError`` for bad windows."""
        samples = int(waveform.shape[0])
        if samples <= max_samples:
            return [Window(0, samples)] if samples else []
        try:
            windows = self.cut(waveform, max_samples)
            _check(windows, samples, max_samples, type(self))
        except OasrError:
            raise
        except Exception as error:
            raise PluginContractError(
                f"{type(self).__name__} could not cut {samples} samples: {type(error).__name__}: {error}; speech() "
                "gives SpeechSpans, cut() Windows."
            ) from error
        return windows

    def open_stream(self) -> SpeechStream:
        """Follow one stream; ``ConfigError`` where :attr:`offers_streams` is false."""
        raise ConfigError(f"{type(self).__name__} does not follow streams; choose a segmenter that does, as 'vad'.")


def _widened(windows: Sequence[Window], samples: int, max_samples: int, margin: int) -> list[Window]:
    """Windows that take in up to ``margin`` samples on both sides, of gaps between two at most half."""
    ends = [0, *(window.end for window in windows)]
    starts = [*(window.start for window in windows[1:]), samples]
    widened = []
    for index, window in enumerate(windows):
        gap_before, gap_behind = window.start - ends[index], starts[index] - window.end
        room = max_samples - (window.end - window.start)
        before = min(margin, gap_before // 2 if index else gap_before, room // 2)
        behind = min(margin, gap_behind // 2 if index + 1 < len(windows) else gap_behind, room - before)
        widened.append(Window(window.start - before, window.end + behind))
    return widened


def _check(windows: Sequence[Window], samples: int, max_samples: int, cls: type[Segmenter]) -> None:
    before: Window | None = None
    for window in windows:
        shared = max(before.end - window.start, 0) if before else 0
        if not (
            0 <= window.start < window.end <= samples
            and window.end - window.start <= max_samples
            and (before is None or (window.start > before.start and window.end > before.end))
            and window.overlap_before == shared
            and (cls.shares_audio or not shared)
        ):
            behind = f" behind {before}" if before else ""
            raise PluginContractError(
                f"{cls.__name__}.cut gave {window}{behind}; windows advance, lie within the {samples} samples, are not "
                f"longer than {max_samples}, and state in overlap_before what they share with the one before (nothing "
                f"unless shares_audio is true)."
            )
        before = window
