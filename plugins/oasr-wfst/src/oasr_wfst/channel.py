"""The state of one search: an utterance, or a stream of any length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oasr_core.decoding.base import Session
from oasr_wfst.blanks import BlankSkipper
from oasr_wfst.recorder import LatticeRecorder
from oasr_wfst.tokens import DEAD, NUM_COUNTERS, ROOT_STEP, Doubles, Ints, Longs, Records


class Spoken(NamedTuple):
    """Words of a part of a path, in numbers of frames searched; see :func:`~oasr_wfst.history.words_of`."""

    words: Ints
    starts: Longs
    ends: Longs
    before: int


class Path(NamedTuple):
    """A path through the graph.

    ``words`` are word ids, ``frames`` the frame, counted from the start of the utterance, in which the arc of each word
    is taken, ``end_frames`` the first one behind the word's last label (``None``: not known). ``score`` is the sum of
    the arcs' scores and log posteriors, and ``reached_final`` says whether the path ends in a final state of the graph.
    ``silent_frames`` follow the last label that is not blank; the first ``settled`` words are those of every path that
    can still win, all of them at the end.
    """

    words: list[int]
    frames: list[int]
    end_frames: list[int] | None
    score: float
    reached_final: bool
    silent_frames: int = 0
    settled: int = 0


class Channel(Session):
    """What a search knows between two chunks.

    ``states`` and ``scores`` are the tokens of the last frame, ``records`` their paths back to the root, the last arc
    that all of them share; ``words``, ``frames`` and ``end_frames`` are what lies before the root.
    """

    def __init__(self, blanks: BlankSkipper, search_beam: float, records: int) -> None:
        self.blanks = blanks
        self.states: Ints = np.empty(0, np.int32)
        self.scores: Doubles = np.empty(0, np.float64)
        self.records = Records.of(records)
        self.counters: Longs = np.zeros(NUM_COUNTERS, np.int64)
        self.beam: Doubles = np.full(1, search_beam)
        self.words: list[int] = []
        self.frames: list[int] = []
        self.end_frames: list[int] = []
        #: What the lattice is made of, where one is wanted; it needs the frames of all steps.
        self.recorder: LatticeRecorder | None = None
        #: Frames of the utterance so far, with those that were not searched.
        self.num_frames = 0
        #: Frame of the last label before the root that is not blank.
        self.last_speech = -1
        #: Frames of the utterance that were searched, those since the root.
        self._searched: Longs = np.empty(0, np.int64)
        self._first_searched = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, without the words."""
        arrays = (self.states, self.scores, *self.records, self._searched)
        return sum(array.nbytes for array in arrays)

    @property
    def is_dead(self) -> bool:
        """Whether no path could go on; the tokens are then those of the last frame that had some."""
        return bool(self.counters[DEAD])

    @property
    def searched_frames(self) -> Longs:
        """Frame of each step, of all steps where a lattice is kept."""
        return self._searched

    def extend(self, rows: Longs, num_frames: int) -> None:
        """A chunk of ``num_frames`` frames, of which ``rows`` are searched."""
        self._searched = np.concatenate([self._searched, rows + self.num_frames])
        self.num_frames += num_frames

    def frame_of(self, steps: Longs) -> Longs:
        """The frame of each arc; ``steps`` are the numbers of searched frames consumed when it has been taken.

        An arc before the first frame is in frame 0.
        """
        if not len(self._searched):
            return np.zeros(len(steps), np.int64)
        found: Longs = self._searched[np.maximum(steps - 1, 0) - self._first_searched]
        return found

    def frame_at(self, step: int) -> int:
        """:meth:`frame_of` one arc."""
        return int(self.frame_of(np.array([step], np.int64))[0])

    def settle(self, said: Spoken, last_speech: int) -> None:
        """Words before the new root; ``last_speech`` is the last frame of speech before it, -1 where none is new."""
        self.words, self.frames, self.end_frames = self.with_words(said)
        self.last_speech = max(self.last_speech, last_speech)
        if self.recorder is not None:
            return
        # The root itself ends in the frame before it, which an epsilon arc behind the root may refer to.
        unneeded = max(int(self.counters[ROOT_STEP]) - 1 - self._first_searched, 0)
        self._searched = self._searched[unneeded:]
        self._first_searched += unneeded

    def with_words(self, said: Spoken) -> tuple[list[int], list[int], list[int]]:
        """Words, frames and end frames of the whole path, of which ``said`` lies behind the root."""
        end_frames = list(self.end_frames)
        if said.before >= 0 and end_frames:
            end_frames[-1] = self.frame_at(said.before) + 1
        return (
            self.words + said.words.tolist(),
            self.frames + self.frame_of(said.starts).tolist(),
            end_frames + (self.frame_of(said.ends) + 1).tolist(),
        )
