"""The decode strategy ``ctc_wfst``: beam search over a decoding graph, offline and streaming."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Hypothesis, NoOptions, Session
from oasr_core.errors import ConfigError, PluginContractError
from oasr_core.models.base import CtcInterface, EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.tokenizers.base import Tokenizer
from oasr_wfst.backends import build_decoder
from oasr_wfst.channel import Channel, Path
from oasr_wfst.fit import check_tokens
from oasr_wfst.graph import Graph
from oasr_wfst.load import load_graph
from oasr_wfst.options import CtcWfstOptions
from oasr_wfst.words import WordTable

logger = logging.getLogger(__name__)


class GraphSession(Session):
    """A stream: its channel, and what was found when it ended."""

    def __init__(self, channel: Channel, n_best: int) -> None:
        self.channel = channel
        self.n_best = n_best


class CtcWfstStrategy(DecodeStrategy):
    """Searches a decoding graph for the best path under the frame-wise label posteriors of a CTC model.

    Tokens of the hypotheses are the graph's words; the frame of a word is that of the arc that carries it. Offline the
    beam follows k2's rules for whole utterances, in streams its online rules. Results do not depend on how a stream is
    cut into chunks, nor on neighbours in a batch. Takes no hotwords: a graph says what may be said.
    """

    oasr_api = "1.0"
    requires = ("ctc",)
    consumes = "log_probs"
    modes = ("offline", "streaming")
    honours = frozenset({"word_timestamps"})
    options_cls = CtcWfstOptions

    def __init__(self, context: DecodeContext) -> None:
        """Raises ``ConfigError`` for options that cannot be honoured and ``GraphError`` for a damaged graph."""
        super().__init__(context)
        options = CtcWfstOptions() if isinstance(context.options, NoOptions) else context.options
        if not isinstance(options, CtcWfstOptions):
            raise PluginContractError(
                f"Strategy 'ctc_wfst' was given options of type {type(options).__name__}; it takes CtcWfstOptions."
            )
        if options.fst_path is None:
            raise ConfigError(
                "Strategy 'ctc_wfst' needs decode_options['fst_path']: a graph image (make one with `oasr wfst "
                "build`), k2's HLG.pt, or an OpenFst file."
            )
        interface: CtcInterface = context.model.interfaces["ctc"]
        graph = load_graph(
            options.fst_path, words=options.words, tokens=options.tokens, label_offset=options.label_offset
        )
        _check_graph(graph, options, int(interface.vocab_size), int(interface.blank_id))
        check_tokens(options.fst_path, graph.tokens, context.tokenizer)
        self.decoder = build_decoder(
            graph, options, int(interface.blank_id), torch.get_num_threads(), context.device or torch.device("cpu")
        )
        self.decoder.warm_up()
        self.allow_partial = options.allow_partial
        self._words = WordTable(graph.symbols, options.word_separator)

    @property
    def output_tokenizer(self) -> Tokenizer:
        """The words of the graph."""
        return self._words

    def decode_offline(self, out: EncoderOutput, options: Sequence[DecodingOptions]) -> list[Hypotheses]:
        """Decode whole utterances; a hypothesis without tokens and a score of -inf is no path."""
        sessions = [self.open(wanted) for wanted in options]
        self.decoder.advance_output([session.channel for session in sessions], out, whole=True)
        return [self._ended(session) for session in sessions]

    def open(self, options: DecodingOptions) -> GraphSession:
        """Begin a stream."""
        return GraphSession(self.decoder.open(lattice=options.n_best > 1), options.n_best)

    def decode_chunk(self, sessions: Sequence[Session], out: EncoderOutput, last: Sequence[bool]) -> list[Hypotheses]:
        """Advance all streams by their chunk; raises ``InvalidLogProbsError`` before any session has changed."""
        graph_sessions = [_own(session) for session in sessions]
        self.decoder.advance_output([session.channel for session in graph_sessions], out)
        return [
            self._ended(session) if ended else self._so_far(session)
            for session, ended in zip(graph_sessions, last, strict=True)
        ]

    def current(self, session: Session) -> Hypotheses:
        """The stream's hypotheses, as if the audio ended here."""
        return self._ended(_own(session))

    def _so_far(self, session: GraphSession) -> Hypotheses:
        """The best path, wherever it ends; nothing is certain of a path that may yet be refused."""
        path = self.decoder.partial(session.channel)
        return _hypotheses([path], stable=path.settled if self.allow_partial else 0)

    def _ended(self, session: GraphSession) -> Hypotheses:
        channel = session.channel
        path = self.decoder.final(channel)
        if path is None:
            logger.info("no path of the graph fits the %d frames of an utterance", channel.num_frames)
            path = Path([], [], None, -math.inf, False, silent_frames=channel.num_frames)
            return _hypotheses([path], stable=0)
        if not path.reached_final:
            logger.info("the best path of an utterance of %d frames ends in no final state", channel.num_frames)
        paths = [path, *self.decoder.alternatives(channel, path, session.n_best - 1)]
        return _hypotheses(paths, stable=path.settled if self.allow_partial else 0)


def _own(session: Session) -> GraphSession:
    if not isinstance(session, GraphSession):
        raise PluginContractError(f"Strategy 'ctc_wfst' was given a {type(session).__name__}; it opens its own.")
    return session


def _hypotheses(paths: Sequence[Path], stable: int) -> Hypotheses:
    return Hypotheses(
        [Hypothesis(path.words, path.frames, score=path.score, end_frames=path.end_frames) for path in paths],
        trailing_silence_frames=paths[0].silent_frames,
        stable_tokens=stable,
        reached_final=paths[0].reached_final,
    )


def _check_graph(graph: Graph, options: CtcWfstOptions, vocab_size: int, blank_id: int) -> None:
    if graph.num_columns > vocab_size:
        raise ConfigError(
            f"{options.fst_path}: the graph has labels up to {graph.max_label} and the model has {vocab_size} outputs; "
            "the graph was built for other tokens, or label_offset is wrong."
        )
    if blank_id != 0:
        raise ConfigError(
            f"graphs have the blank in column 0 and the model's is {blank_id}; such models are not served."
        )
    if len(graph.words) and not len(graph.symbols):
        raise ConfigError(
            f"{options.fst_path} has word ids and no words; set decode_options['words'] to its words.txt."
        )
