"""The decode strategy ``ctc``: prefix beam search or greedy search, offline and streaming."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Mode, NoOptions, Session
from oasr_core.errors import PluginContractError
from oasr_core.models.base import CtcInterface, EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_ctc.greedy_search import GreedySearch
from oasr_ctc.options import CtcOptions
from oasr_ctc.search import Search


class CtcStrategy(DecodeStrategy):
    """Searches the frame-wise label posteriors of a CTC model.

    A token's frame is the first frame of its run, counted from the start of the utterance; its log posterior is the
    larger of those in that frame and in the next one. Results do not depend on how an utterance is cut into chunks, nor
    on its neighbours in a batch.
    """

    oasr_api = "1.0"
    requires = ("ctc",)
    consumes = "log_probs"
    modes = ("offline", "streaming")
    honours = frozenset({"word_timestamps", "hotwords"})
    options_cls = CtcOptions

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``ConfigError`` for options that cannot be honoured."""
        super().__init__(context)
        interface: CtcInterface = context.model.interfaces["ctc"]
        self.blank_id = int(interface.blank_id)
        options = CtcOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, CtcOptions):
            raise PluginContractError(
                f"Strategy 'ctc' was given options of type {type(options).__name__}; it takes CtcOptions."
            )
        options.check(self.blank_id)
        self.search = self._build_search(options, int(interface.vocab_size))

    def _build_search(self, options: CtcOptions, vocab_size: int) -> Search:
        if options.search == "greedy":
            return GreedySearch(self.blank_id)
        from oasr_ctc.beam import BeamSearch  # compiles its kernels, which greedy search does without

        return BeamSearch(vocab_size, self.blank_id, options, self.context.tokenizer)

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse more hypotheses than the search has, and hotwords where it takes none."""
        self.search.validate(options, mode)

    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode whole utterances: a stream of one chunk for each row."""
        log_probs = _log_probs(out, len(options))
        sessions = [self.open(wanted) for wanted in options]
        try:
            return self._advance(sessions, log_probs, out.lengths)
        finally:
            for session in sessions:
                self.close(session)

    def open(self, options: DecodingOptions) -> Session:
        """Begin a stream."""
        return self.search.open(options)

    def decode_chunk(self, sessions: Sequence[Session], out: EncoderOutput, last: Sequence[bool]) -> list[Hypotheses]:
        """Advance all streams by their chunk: one search over the batch.

        The lists in a result belong to its session and grow in place with its next chunk; who keeps them copies them.
        Raises :class:`~oasr_ctc.greedy.InvalidLogProbsError` before any session has changed.
        """
        return self._advance(sessions, _log_probs(out, len(sessions)), out.lengths) if sessions else []

    def current(self, session: Session) -> Hypotheses:
        """The stream's hypotheses, as if the audio ended here; their lists are the session's own."""
        return self.search.results([session])[0]

    def close(self, session: Session) -> None:
        """Release the state of a stream."""
        self.search.close(session)

    def _advance(self, sessions: Sequence[Session], log_probs: Tensor, lengths: Tensor) -> list[Hypotheses]:
        if sessions:
            self.search.advance(sessions, log_probs, lengths)
        return self.search.results(sessions)


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
