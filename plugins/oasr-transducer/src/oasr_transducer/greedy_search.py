"""Greedy search of streams: one walk for all of them, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from oasr_core.decoding.base import Hypotheses, Hypothesis, Mode, Session
from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_transducer.greedy import GreedyWalk
from oasr_transducer.joint import Joint
from oasr_transducer.prediction import PredictionPool, Predictor
from oasr_transducer.search import Search


@dataclass(slots=True, eq=False)
class GreedySession(Session):
    """What one stream has said so far, and its row in the pool (0: none yet).

    ``skip`` frames of its next chunk are jumped over by the last token's duration.
    """

    row: int = 0
    tokens: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)
    score: float = 0.0
    frame_count: int = 0
    skip: int = 0


class GreedySearch(Search):
    """Takes the best label at each point; the score is the log posterior of that path."""

    def __init__(self, joint: Joint, predictor: Predictor, max_sym_per_frame: int) -> None:
        self._walk = GreedyWalk(joint, predictor, max_sym_per_frame)
        self.pool = PredictionPool(predictor)

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse what only beam search can give: a second hypothesis, hotwords."""
        for name, wanted in (("n_best", options.n_best > 1), ("hotwords", bool(options.hotwords))):
            if wanted:
                raise RequestRefusedError(
                    f"{name}={getattr(options, name)!r} is refused by decode strategy 'transducer' ({mode}): greedy "
                    f"search has one hypothesis and no context; leave {name} unset or set the decode option "
                    "search='beam'."
                )

    def open(self, options: DecodingOptions) -> GreedySession:
        """Begin a stream."""
        return GreedySession()

    def advance(self, sessions: Sequence[Session], hidden: Tensor, lengths: Sequence[int], *, keep: bool) -> None:
        """One walk over the batch; see :meth:`Search.advance`."""
        streams = cast("Sequence[GreedySession]", sessions)
        before = self.pool.read([stream.row for stream in streams], hidden.device)
        walked, after = self._walk.walk(before, hidden, lengths, [stream.skip for stream in streams])
        for row, (stream, length) in enumerate(zip(streams, lengths, strict=True)):
            part = slice(walked.bounds[row], walked.bounds[row + 1])
            stream.tokens += walked.tokens[part]
            stream.frames += [stream.frame_count + frame for frame in walked.frames[part]]
            stream.token_log_probs += walked.log_probs[part]
            stream.score += walked.scores[row]
            stream.frame_count += length
            stream.skip = walked.skips[row]
        if keep:
            for stream in streams:
                stream.row = stream.row or self.pool.take(1)[0]
            self.pool.write([stream.row for stream in streams], after)

    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """Each stream's only hypothesis; its lists are the session's own."""
        return [
            Hypotheses(
                [Hypothesis(stream.tokens, stream.frames, stream.token_log_probs, stream.score)],
                trailing_silence_frames=stream.frame_count - 1 - (stream.frames[-1] if stream.frames else -1),
                stable_tokens=len(stream.tokens),
            )
            for stream in cast("Sequence[GreedySession]", sessions)
        ]

    def close(self, session: Session) -> None:
        """Give the row back."""
        stream = cast("GreedySession", session)
        if stream.row:
            self.pool.give_back([stream.row])
            stream.row = 0
