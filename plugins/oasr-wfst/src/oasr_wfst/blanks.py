"""Blank frames that are not searched."""

from __future__ import annotations

import math

import numpy as np

from oasr_wfst.tokens import Floats, Longs


class BlankSkipper:
    """Picks the frames of one utterance that are searched, chunk by chunk.

    A frame whose blank posterior exceeds the threshold is left out if the frame before it exceeded it too: one frame of
    each run of blanks stays, for two equal labels with nothing between them would be taken for one. What is left out
    adds nothing to a score.
    """

    def __init__(self, threshold: float, blank: int) -> None:
        """``threshold`` is a posterior; 1 leaves no frame out. ``blank`` is a column."""
        self._least = math.log(threshold) if threshold > 0 else -math.inf
        self._searches_all = threshold >= 1
        self._blank = blank
        self._after_blank = False

    def frames(self, log_probs: Floats) -> Longs:
        """Rows of ``log_probs`` ``(frames, labels)`` to search, in order."""
        if self._searches_all or not len(log_probs):
            return np.arange(len(log_probs), dtype=np.int64)
        blank = log_probs[:, self._blank] > self._least
        before = np.concatenate([[self._after_blank], blank[:-1]])
        self._after_blank = bool(blank[-1])
        return np.flatnonzero(~(blank & before)).astype(np.int64)
