"""The decode strategy ``ctc``: greedy search, offline and streaming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Hypothesis, Mode, NoOptions, Session
from oasr_core.errors import PluginContractError, RequestRefusedError
from oasr_core.models.base import CtcInterface, EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_ctc.greedy import best_path, find_runs
from oasr_ctc.options import CtcOptions


@dataclass(slots=True)
class CtcSession(Session):
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


class CtcStrategy(DecodeStrategy):
    """Takes the best label of each frame, collapses repeats and drops blanks.

    A token's frame is the first frame of its run, counted from the start of the utterance; its log posterior is the
    larger of those in that frame and in the next one; a hypothesis' score is the log posterior of the whole best path.
    Results do not depend on how an utterance is cut into chunks, nor on its neighbours in a batch.
    """

    oasr_api = "1.0"
    requires = ("ctc",)
    consumes = "log_probs"
    modes = ("offline", "streaming")
    honours = frozenset({"word_timestamps"})
    options_cls = CtcOptions

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``ConfigError`` for options that greedy search cannot honour."""
        super().__init__(context)
        interface: CtcInterface = context.model.interfaces["ctc"]
        self.blank_id = int(interface.blank_id)
        options = CtcOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, CtcOptions):
            raise PluginContractError(
                f"Strategy 'ctc' was given options of type {type(options).__name__}; it takes CtcOptions."
            )
        options.refuse_unserved(self.blank_id)

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse ``n_best`` above 1: greedy search has one hypothesis."""
        if options.n_best > 1:
            raise RequestRefusedError(
                f"n_best={options.n_best} is refused by decode strategy 'ctc' ({mode}): greedy search gives one "
                "hypothesis and prefix beam search is not served yet; ask for n_best=1."
            )

    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode whole utterances: a stream of one chunk for each row."""
        return self.decode_chunk([self.open(wanted) for wanted in options], out, [True] * len(options))

    def open(self, options: DecodingOptions) -> CtcSession:
        """Begin a stream."""
        return CtcSession(last_label=self.blank_id)

    def decode_chunk(self, sessions: Sequence[Session], out: EncoderOutput, last: Sequence[bool]) -> list[Hypotheses]:
        """Advance all streams by their chunk: one search over the batch, one copy to the host.

        The lists in a result belong to its session and grow in place with its next chunk; who keeps them copies them.
        Raises :class:`~oasr_ctc.greedy.InvalidLogProbsError` before any session has changed.
        """
        streams = cast("Sequence[CtcSession]", sessions)
        if not streams:
            return []
        carried = [stream.last_label for stream in streams]
        path = best_path(_log_probs(out, len(streams)), out.lengths, carried)
        runs = find_runs(path, carried, self.blank_id)
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
        return [self.current(stream) for stream in streams]

    def current(self, session: Session) -> Hypotheses:
        """The stream's only hypothesis; its lists are the session's own, see :meth:`decode_chunk`."""
        stream = cast("CtcSession", session)
        return Hypotheses(
            [Hypothesis(stream.tokens, stream.frames, stream.token_log_probs, stream.score)],
            trailing_silence_frames=stream.frame_count - 1 - stream.last_spoken,
        )


def _log_probs(out: EncoderOutput, rows: int) -> Tensor:
    if out.log_probs is None:
        raise PluginContractError(
            "Strategy 'ctc' consumes log_probs, but the encoder output has none; run the forward with the CTC head."
        )
    if len(out.log_probs) != rows:
        raise PluginContractError(
            f"Strategy 'ctc' was given {rows} requests and log_probs of {len(out.log_probs)} rows; they must be equal."
        )
    return out.log_probs
