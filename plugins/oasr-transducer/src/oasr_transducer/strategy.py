"""The decode strategy ``transducer``: greedy search or modified beam search, offline and streaming."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Mode, NoOptions, Session
from oasr_core.decoding.hotwords import HotwordEncoder
from oasr_core.errors import PluginContractError
from oasr_core.models.base import EncoderOutput, TransducerInterface
from oasr_core.request import DecodingOptions
from oasr_transducer.beam_search import BeamSearch
from oasr_transducer.greedy_search import GreedySearch
from oasr_transducer.joint import Joint
from oasr_transducer.options import TransducerOptions
from oasr_transducer.prediction import Predictor
from oasr_transducer.search import Search


class TransducerStrategy(DecodeStrategy):
    """Searches the outputs of a transducer's encoder with its predictor and joiner.

    A token's frame is the one that emitted it, counted from the start of the utterance; its log posterior is the one
    of the joint network there. Results do not depend on how an utterance is cut into chunks, nor on its neighbours in
    a batch.
    """

    oasr_api = "1.0"
    requires = ("transducer",)
    consumes = "hidden"
    modes = ("offline", "streaming")
    honours = frozenset({"word_timestamps", "hotwords"})
    options_cls = TransducerOptions

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``ConfigError`` for options that cannot be honoured."""
        super().__init__(context)
        options = TransducerOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, TransducerOptions):
            raise PluginContractError(
                f"Strategy 'transducer' was given options of type {type(options).__name__}; it takes TransducerOptions."
            )
        interface: TransducerInterface = context.model.interfaces["transducer"]
        _check_durations(interface.durations)
        options.check(interface.durations)
        self.search = self._build_search(options, interface)

    def _build_search(self, options: TransducerOptions, interface: TransducerInterface) -> Search:
        joint, predictor = Joint(interface, options.blank_penalty), Predictor(interface)
        if options.search == "greedy":
            return GreedySearch(joint, predictor, options.max_sym_per_frame or int(interface.max_sym_per_frame))
        hotwords = HotwordEncoder(
            self.context.tokenizer, options, joint.vocab_size, joint.silent, strategy="transducer"
        )
        return BeamSearch(joint, predictor, hotwords, options.beam_size, int(interface.predictor.context_size))

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse more hypotheses than the search has, and hotwords where it takes none."""
        self.search.validate(options, mode)

    @torch.inference_mode()
    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode whole utterances: a stream of one chunk for each row."""
        lengths = _lengths(out, len(options))
        sessions = [self.open(wanted) for wanted in options]
        if sessions:
            self.search.advance(sessions, out.hidden, lengths, keep=False)
        return self.search.results(sessions)

    def open(self, options: DecodingOptions) -> Session:
        """Begin a stream."""
        return self.search.open(options)

    @torch.inference_mode()
    def decode_chunk(self, sessions: Sequence[Session], out: EncoderOutput, last: Sequence[bool]) -> list[Hypotheses]:
        """Advance all streams by their chunk: one search over the batch.

        The lists in a result belong to its session and grow in place with its next chunk; who keeps them copies them.
        Raises :class:`~oasr_transducer.errors.InvalidLogitsError` before any session has changed.
        """
        lengths = _lengths(out, len(sessions))
        if sessions:
            self.search.advance(sessions, out.hidden, lengths, keep=True)
        return self.search.results(sessions)

    def current(self, session: Session) -> Hypotheses:
        """The stream's hypotheses, as if the audio ended here; their lists are the session's own."""
        return self.search.results([session])[0]

    def close(self, session: Session) -> None:
        """Release the state of a stream."""
        self.search.close(session)


def _lengths(out: EncoderOutput, rows: int) -> list[int]:
    """Frames of each row, on the host: the one read of a device in front of a search."""
    if len(out.hidden) != rows or len(out.lengths) != rows:
        raise PluginContractError(
            f"Strategy 'transducer' was given {rows} requests, hidden states of {len(out.hidden)} rows and "
            f"{len(out.lengths)} lengths; they must be equal."
        )
    lengths: list[int] = out.lengths.tolist()
    if lengths and max(lengths) > out.hidden.shape[1]:
        raise PluginContractError(
            f"Strategy 'transducer' was given hidden states of {out.hidden.shape[1]} frames and lengths {lengths}; no "
            "length may be larger."
        )
    return lengths


def _check_durations(durations: tuple[int, ...] | None) -> None:
    if durations is not None and (not durations or min(durations) < 0 or max(durations) < 1):
        raise PluginContractError(
            f"Interface 'transducer' has durations={durations}; a token-and-duration transducer has frames to advance "
            "by, none negative and one at least positive, and any other has None."
        )
