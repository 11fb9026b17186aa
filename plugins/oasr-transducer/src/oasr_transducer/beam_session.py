"""The beam of one stream between its chunks: numbers, and the tokens of its hypotheses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oasr_core.decoding.base import Hypotheses, Hypothesis, Session
from oasr_core.decoding.hotwords import HotwordContext

Longs = npt.NDArray[np.int64]

#: Rows of :attr:`BeamSession.numbers`; floats travel as their bits.
LOG_PROB, KEPT, HASH, LENGTH, STATE = range(5)


class Emission(NamedTuple):
    """A token of a hypothesis, its frame from the start of the utterance, and its log posterior there."""

    token: int
    frame: int
    log_prob: float


@dataclass(slots=True, eq=False)
class BeamSession(Session):
    """A stream's hypotheses.

    ``numbers`` ``(5, beam)`` are those of :class:`~oasr_transducer.beam.Beams`; ``rows`` its rows in the pool (empty:
    none yet). All hypotheses begin with the first ``settled`` tokens of the lists and go on with their ``tails``;
    behind ``settled`` the lists are those of the hypothesis that was the best when last read.
    """

    n_best: int
    context: HotwordContext
    numbers: Longs
    tails: list[list[Emission]]
    rows: list[int] = field(default_factory=list)
    frame_count: int = 0
    settled: int = 0
    tokens: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, n_best: int, context: HotwordContext, beam_size: int) -> BeamSession:
        """One hypothesis without tokens."""
        session = cls(n_best, context, np.zeros((5, beam_size), np.int64), [[] for _ in range(beam_size)])
        session.numbers[LOG_PROB].view(np.float64)[1:] = -math.inf
        return session

    @property
    def alive(self) -> list[int]:
        """Places of the beam that hold a hypothesis."""
        places: list[int] = np.flatnonzero(self.numbers[LOG_PROB].view(np.float64) > -math.inf).tolist()
        return places

    def go_on(self, numbers: Longs, origins: Sequence[int], news: Sequence[Sequence[Emission]], frames: int) -> None:
        """Take over a chunk of ``frames`` frames: each hypothesis goes on from an old one with its new emissions."""
        self.numbers = numbers
        self.frame_count += frames
        alive = set(self.alive)
        self.tails = [
            [*self.tails[origin], *new] if place in alive else []
            for place, (origin, new) in enumerate(zip(origins, news, strict=True))
        ]
        agreed = _common([self.tails[place] for place in alive])
        if agreed:
            self._show(self.tails[next(iter(alive))][:agreed])
            self.settled += agreed
            self.tails = [tail[agreed:] for tail in self.tails]

    def result(self, context_size: int) -> Hypotheses:
        """The n best; a score is divided by the tokens and ``context_size``. The best one's lists are the session's."""
        log_probs, kept = self.numbers[LOG_PROB].view(np.float64), self.numbers[KEPT].view(np.float64)
        alive = self.alive
        sizes = self.numbers[LENGTH] + context_size
        scores = {place: float((log_probs[place] + kept[place]) / sizes[place]) for place in alive}
        ranked = sorted(alive, key=lambda place: -scores[place])[: self.n_best]
        self._show(self.tails[ranked[0]])
        nbest = [Hypothesis(self.tokens, self.frames, self.token_log_probs)]
        nbest += [self._other(self.tails[place]) for place in ranked[1:]]
        for hypothesis, place in zip(nbest, ranked, strict=True):
            hypothesis.score, hypothesis.context_score = scores[place], float(kept[place])
        return Hypotheses(
            nbest,
            trailing_silence_frames=self.frame_count - 1 - (self.frames[-1] if self.frames else -1),
            stable_tokens=self.settled + _common([[said.token for said in self.tails[place]] for place in alive]),
            unencoded_hotwords=list(self.context.unencoded),
        )

    def _show(self, tail: Sequence[Emission]) -> None:
        """Let the lists go on with ``tail`` behind what is settled."""
        self.tokens[self.settled :] = [said.token for said in tail]
        self.frames[self.settled :] = [said.frame for said in tail]
        self.token_log_probs[self.settled :] = [said.log_prob for said in tail]

    def _other(self, tail: Sequence[Emission]) -> Hypothesis:
        end = self.settled
        return Hypothesis(
            self.tokens[:end] + [said.token for said in tail],
            self.frames[:end] + [said.frame for said in tail],
            self.token_log_probs[:end] + [said.log_prob for said in tail],
        )


def _common(lists: Sequence[Sequence[object]]) -> int:
    """How many items all lists begin with."""
    return sum(1 for _ in takewhile(lambda items: all(item == items[0] for item in items), zip(*lists, strict=False)))
