"""CTC prefix beam search of streams: exact sums over alignments, n best, hotwords."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_core.compiled import compilation_announced
from oasr_core.decoding.base import Hypotheses, Hypothesis, Mode, Session
from oasr_core.decoding.context import ContextGraph
from oasr_core.decoding.hotwords import HotwordContext, HotwordEncoder
from oasr_core.errors import PluginContractError, RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.tokenizers.base import Tokenizer
from oasr_ctc.beams import Prefixes
from oasr_ctc.emissions import agreed, settle, trace
from oasr_ctc.greedy import InvalidLogProbsError
from oasr_ctc.limits import Limits
from oasr_ctc.options import CtcOptions
from oasr_ctc.pool import BeamPool
from oasr_ctc.prefix_search import Longs, search
from oasr_ctc.search import Search
from oasr_ctc.selection import Ints, select_labels
from oasr_ctc.tensor_search import advance_tensors, first_invalid

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BeamSession(Session):
    """A stream's slot in the pool, and what the best hypothesis was when it was read last.

    The first ``settled`` tokens of the lists can change no more; the first ``stable`` are common to all prefixes. Both
    are found by walking over all that is undecided: again when the best hypothesis has ``next_check`` tokens, an eighth
    more than is undecided now, so that the walk costs no more for each token of a long stream.
    """

    slot: int
    n_best: int
    context: HotwordContext
    settled: int = 0
    stable: int = 0
    next_check: int = 0
    tokens: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)

    def begun(self) -> BeamSession:
        """A copy with what is settled alone: where another hypothesis begins."""
        end = self.settled
        return replace(
            self, tokens=self.tokens[:end], frames=self.frames[:end], token_log_probs=self.token_log_probs[:end]
        )


class BeamSearch(Search):
    """Keeps, after each frame, the ``beam_size`` prefixes of the largest summed probability.

    Without ``first_beam_size`` every extension of every prefix of the beam is considered. The score of a hypothesis is
    the log of the summed probability of its alignments (of those that went through the beams), plus its context score.
    Frames and posteriors are those of its best alignment.
    """

    def __init__(self, vocab_size: int, blank_id: int, options: CtcOptions, tokenizer: Tokenizer) -> None:
        """Compiles the kernels, or loads them from the cache."""
        self._options = options
        self._vocab_size = vocab_size
        self._limits = Limits.of(options, blank_id)
        self._hotwords = HotwordEncoder(tokenizer, options, vocab_size, [blank_id], strategy="ctc")
        self.pool = BeamPool(options.beam_size)
        self._warm_up()

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse more hypotheses than the beam has, and, in strict mode, hotwords that cannot be encoded."""
        if options.n_best > self._options.beam_size:
            raise RequestRefusedError(
                f"n_best={options.n_best} is refused by decode strategy 'ctc' ({mode}): beam_size is "
                f"{self._options.beam_size}; ask for fewer, or set a larger beam_size in decode_options."
            )
        self._hotwords.validate(options)

    def open(self, options: DecodingOptions) -> BeamSession:
        """Begin a stream."""
        context = self._hotwords.context(options)
        return BeamSession(self.pool.open(), options.n_best, context)

    def close(self, session: Session) -> None:
        """Give the slot back."""
        self.pool.close(cast("BeamSession", session).slot)

    def advance(self, sessions: Sequence[Session], log_probs: Tensor, lengths: Tensor) -> None:
        """One search for all streams that share their hotwords; see :meth:`Search.advance`."""
        streams = cast("Sequence[BeamSession]", sessions)
        if log_probs.shape[2] != self._vocab_size:
            raise PluginContractError(
                f"Strategy 'ctc' was given log_probs of {log_probs.shape[2]} labels by a model whose interface 'ctc' "
                f"says vocab_size={self._vocab_size}; they must be equal."
            )
        log_probs = log_probs.detach().float().contiguous()
        limits = self._limits.within(log_probs.shape[2], max(stream.context.penalised for stream in streams))
        if log_probs.device.type == "cpu":
            self._advance_host(streams, log_probs, lengths, limits)
        else:
            self._advance_device(streams, log_probs, lengths, limits)

    def _advance_host(self, streams: Sequence[BeamSession], log_probs: Tensor, lengths: Tensor, limits: Limits) -> None:
        posteriors, frames = log_probs.numpy(), lengths.to(torch.int64).numpy()
        labels = np.empty((*posteriors.shape[:2], limits.width), np.int32)
        counts = np.empty(posteriors.shape[:2], np.int32)
        refuse_invalid(select_labels(posteriors, frames, limits.blank, limits.threshold, labels, counts))
        pool = self.pool
        for graph, rows, slots in _by_graph(streams):
            row, frame = 0, 0
            while True:
                row, frame, pool.used = search(
                    posteriors, frames, labels, counts, limits.blank, limits.only_labels, limits.max_length,
                    graph.arrays, rows, slots, pool.beams, pool.sizes, pool.frames, pool.emissions, pool.used,
                    row, frame,
                )  # fmt: skip
                if row == len(rows):
                    break
                pool.make_room(self._options.beam_size)

    def _advance_device(
        self, streams: Sequence[BeamSession], log_probs: Tensor, lengths: Tensor, limits: Limits
    ) -> None:
        refuse_invalid(first_invalid(log_probs, lengths.to(log_probs.device)).cpu().numpy())
        for graph, rows, slots in _by_graph(streams):
            advance_tensors(self.pool, graph, rows, slots, log_probs, lengths, limits)

    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """The n best of each stream, as if the audio ended here: credit of unfinished phrases is given back."""
        streams = cast("Sequence[BeamSession]", sessions)
        pool = self.pool
        slots = np.array([stream.slot for stream in streams], dtype=np.int64)
        beams = pool.beams[slots]
        scores = np.logaddexp(beams["blank"], beams["nonblank"]) + beams["kept"]
        scores[np.arange(beams.shape[1]) >= pool.sizes[slots, None]] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")
        wanted = [order[row, : min(stream.n_best, pool.sizes[stream.slot])] for row, stream in enumerate(streams)]
        owner = np.repeat(np.arange(len(streams)), [len(chosen) for chosen in wanted])
        picked = np.concatenate([*wanted, np.empty(0, np.int64)]).astype(np.int64)
        prefixes = beams[owner, picked]
        in_blank = prefixes["best_blank"] > prefixes["best_nonblank"]
        tails = _tails(pool, slots[owner], prefixes, in_blank)
        silences = pool.frames[slots[owner]] - 1 - np.where(in_blank, prefixes["spoken"], pool.frames[slots[owner]] - 1)
        places = np.cumsum([0, *map(len, wanted)]).tolist()
        nbests = []
        for row, stream in enumerate(streams):
            nbest = []
            for index in range(places[row], places[row + 1]):
                known = stream if index == places[row] else stream.begun()
                known.tokens[stream.settled :], known.frames[stream.settled :] = tails[index][:2]
                known.token_log_probs[stream.settled :] = tails[index][2]
                score, context_score = scores[row, picked[index]], prefixes["kept"][index]
                lists = (known.tokens, known.frames, known.token_log_probs)
                nbest.append(Hypothesis(*lists, score=float(score), context_score=float(context_score)))
            nbests.append(nbest)
        self._settle(streams)
        return [
            Hypotheses(
                nbest,
                trailing_silence_frames=int(silences[place]),
                stable_tokens=stream.stable,
                reached_cap=len(stream.tokens) >= self._limits.max_length,
                unencoded_hotwords=list(stream.context.unencoded),
            )
            for stream, nbest, place in zip(streams, nbests, places[:-1], strict=True)
        ]

    def _settle(self, streams: Sequence[BeamSession]) -> None:
        """Find what of each stream can change no more; its emissions are forgotten."""
        due = [stream for stream in streams if len(stream.tokens) >= stream.next_check]
        pool, slots = self.pool, np.array([stream.slot for stream in due], dtype=np.int64)
        stable = agreed(slots, pool.beams, pool.sizes, pool.emissions, pool.roots, pool.settled)
        settle(slots, pool.beams, pool.sizes, pool.frames, pool.emissions, pool.roots, pool.settled)
        for stream, count in zip(due, stable.tolist(), strict=True):
            stream.stable, stream.settled = count, int(pool.settled[stream.slot])
            stream.next_check = len(stream.tokens) + (len(stream.tokens) - stream.settled) // 8

    def _warm_up(self) -> None:
        """Make the machine code now rather than in the first request."""
        begun = time.perf_counter()
        uniform = torch.full((1, 1, self._vocab_size), -math.log(self._vocab_size))
        with compilation_announced("the CTC search", seconds=15):
            session = self.open(DecodingOptions())
            self.advance([session], uniform, torch.tensor([1]))
            self.results([session])
            self.pool.make_room(1)
            self.close(session)
        logger.info("prefix beam search: kernels ready in %.2f s", time.perf_counter() - begun)


def refuse_invalid(invalid: Ints) -> None:
    """Raise :class:`InvalidLogProbsError` where a row's first invalid frame is not -1."""
    rows = np.flatnonzero(invalid >= 0).tolist()
    if rows:
        raise InvalidLogProbsError.of(rows, int(invalid[rows[0]]))


def _tails(
    pool: BeamPool, slots: Longs, prefixes: Prefixes, in_blank: npt.NDArray[np.bool_]
) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, frames and log posteriors of prefixes behind their streams' settled tokens."""
    ends = np.where(in_blank, prefixes["emission_blank"], prefixes["emission_nonblank"])
    bounds = np.cumsum(np.append(0, prefixes["length"] - pool.settled[slots]))
    tokens, frames = np.empty(bounds[-1], np.int32), np.empty(bounds[-1], np.int32)
    log_probs = np.empty(bounds[-1], np.float32)
    trace(pool.emissions, ends, pool.roots[slots], bounds, tokens, frames, log_probs)
    flat = (tokens.tolist(), frames.tolist(), log_probs.tolist())
    cuts = bounds.tolist()
    return [(flat[0][begin:end], flat[1][begin:end], flat[2][begin:end]) for begin, end in itertools.pairwise(cuts)]


def _by_graph(streams: Sequence[BeamSession]) -> list[tuple[ContextGraph, Longs, Longs]]:
    """Rows and slots of the streams that share their hotwords."""
    groups: dict[int, tuple[ContextGraph, list[int]]] = {}
    for row, stream in enumerate(streams):
        groups.setdefault(id(stream.context.graph), (stream.context.graph, []))[1].append(row)
    return [
        (graph, np.array(rows, dtype=np.int64), np.array([streams[row].slot for row in rows], dtype=np.int64))
        for graph, rows in groups.values()
    ]
