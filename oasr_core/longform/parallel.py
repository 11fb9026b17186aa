"""Windows that are known beforehand and decoded in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from oasr_core.longform.plan import LEAST_WINDOW, ChildSpec, LongFormPlan
from oasr_core.request import RequestOutput
from oasr_core.segmenters.base import Window
from oasr_core.tokenizers.base import Tokenizer


class ParallelPlan(LongFormPlan):
    """Decodes windows independently of one another, at most ``max_in_flight`` at a time, first ones first.

    A window whose output says that it accounts for a part of the audio only (``RequestOutput.consumed_seconds``) is
    gone on with from there.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        samples: int,
        sample_rate: int,
        tokenizer: Tokenizer,
        *,
        max_in_flight: int = 8,
        timed: bool = False,
        keep_words: bool = True,
    ) -> None:
        """``windows`` as :meth:`~oasr_core.segmenters.base.Segmenter.windows` cuts ``samples`` samples.

        ``timed``: the decode family times words, so windows that share audio are asked to, for the sake of the seams;
        ``keep_words``: the request wants these words.
        """
        super().__init__(samples, sample_rate, tokenizer, keep_words=keep_words)
        overlap = any(window.overlap_before for window in windows)
        self._decoding = {"word_timestamps": True} if timed and overlap else {}
        self.windows = list(windows)
        self.max_in_flight = max_in_flight
        self._started = 0
        self._stitched = 0
        self._finished: set[int] = set()
        #: Children of each window with their outputs, in order; and the window of each child that runs or will.
        self._parts: dict[int, list[tuple[ChildSpec, RequestOutput]]] = {}
        self._window_of: dict[int, int] = {}
        self._rests: list[ChildSpec] = []
        self._count = len(self.windows)

    @property
    def progress(self) -> float:
        """Seconds of the finished windows, and of what the cut left out before each of them."""
        if self._complete:
            return self._seconds(self.samples)
        ends = [0, *(window.end for window in self.windows)]
        return self._seconds(sum(ends[index + 1] - ends[index] for index in self._finished))

    @property
    def _complete(self) -> bool:
        return self._stitched == len(self.windows)

    @property
    def _next_start(self) -> float | None:
        return None if self._complete else self._seconds(self.windows[self._stitched].start)

    def _take(self, child: ChildSpec, output: RequestOutput) -> None:
        window = self._window_of.pop(child.index)
        self._parts.setdefault(window, []).append((child, output))
        position = self._position_behind(child, output)
        if child.end - position >= round(LEAST_WINDOW * self.sample_rate):
            self._rests.append(ChildSpec(self._count, position, child.end, self._decoding))
            self._window_of[self._count] = window
            self._count += 1
            return
        self._finished.add(window)
        while self._stitched in self._finished:
            self._stitch(self._stitched)
            self._stitched += 1

    def _stitch(self, window: int) -> None:
        shared = self._seconds(self.windows[window].overlap_before)
        for child, output in self._parts.pop(window):
            start, end = self._seconds(child.start), self._seconds(self._position_behind(child, output))
            self._stitcher.append(output, start, end, shared, until=output.consumed_seconds or None)
            shared = 0.0

    def _start(self) -> list[ChildSpec]:
        room = max(self.max_in_flight - len(self._running), 0)
        chosen, self._rests = self._rests[:room], self._rests[room:]
        first = self._started
        self._started = min(first + room - len(chosen), len(self.windows))
        for index in range(first, self._started):
            chosen.append(ChildSpec(index, self.windows[index].start, self.windows[index].end, self._decoding))
            self._window_of[index] = index
        return chosen
