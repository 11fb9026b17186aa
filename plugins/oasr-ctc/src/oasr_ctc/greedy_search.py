"""Greedy search of streams: the runs of the best path, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from oasr_core.decoding.base import Hypotheses, Hypothesis, Mode, Session
from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_ctc.greedy import best_path, find_runs
from oasr_ctc.search import Search


@dataclass(slots=True)
class GreedySession(Session):
    """What one stream has said so far.

    ``last_label`` is the label of its last frame, ``last_spoken`` its last frame that is not blank (-1: none).
    """

    last_label: int
    tokens: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)
    score: float = 0.0
    frame_count: int = 0
    last_spoken: int = -1

    @property
    def awaits_next_frame(self) -> bool:
        """True where the last token began in the last frame, so that the next frame may still raise its posterior."""
        return bool(self.frames) and self.frames[-1] == self.frame_count - 1


class GreedySearch(Search):
    """Takes the best label of each frame, collapses repeats and drops blanks.

    A token's frame is the first frame of its run; its log posterior is the larger of those in that frame and in the
    next one; the score is the log posterior of the whole best path.
    """

    def __init__(self, blank_id: int) -> None:
        self._blank_id = blank_id

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse what only prefix beam search can give: a second hypothesis, hotwords."""
        for name, wanted in (("n_best", options.n_best > 1), ("hotwords", bool(options.hotwords))):
            if wanted:
                raise RequestRefusedError(
                    f"{name}={getattr(options, name)!r} is refused by decode strategy 'ctc' ({mode}): greedy search "
                    f"has one hypothesis and no context; leave {name} unset or set the decode option search='beam'."
                )

    def open(self, options: DecodingOptions) -> GreedySession:
        """Begin a stream."""
        return GreedySession(last_label=self._blank_id)

    def advance(self, sessions: Sequence[Session], log_probs: Tensor, lengths: Tensor) -> None:
        """One search over the batch, one copy to the host; see :meth:`Search.advance`."""
        streams = cast("Sequence[GreedySession]", sessions)
        carried = [stream.last_label for stream in streams]
        path = best_path(log_probs, lengths, carried)
        runs = find_runs(path, carried, self._blank_id)
        for row, stream in enumerate(streams):
            length = int(path.lengths[row])
            if length == 0:
                continue
            if stream.awaits_next_frame:
                stream.token_log_probs[-1] = max(stream.token_log_probs[-1], float(path.previous_log_probs[row, 0]))
            begin, end = runs.bounds[row], runs.bounds[row + 1]
            stream.tokens += runs.tokens[begin:end]
            stream.frames += [stream.frame_count + frame for frame in runs.frames[begin:end]]
            stream.token_log_probs += runs.log_probs[begin:end]
            stream.score += runs.scores[row]
            stream.last_label = runs.last_labels[row]
            if runs.last_spoken[row] >= 0:
                stream.last_spoken = stream.frame_count + runs.last_spoken[row]
            stream.frame_count += length

    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """Each stream's only hypothesis; its lists are the session's own."""
        return [
            Hypotheses(
                [Hypothesis(stream.tokens, stream.frames, stream.token_log_probs, stream.score)],
                trailing_silence_frames=stream.frame_count - 1 - stream.last_spoken,
                stable_tokens=len(stream.tokens),
            )
            for stream in cast("Sequence[GreedySession]", sessions)
        ]
