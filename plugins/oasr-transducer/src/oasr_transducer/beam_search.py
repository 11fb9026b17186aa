"""Modified beam search of streams: one search for all of them, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from oasr_core.decoding.base import Hypotheses, Mode, Session
from oasr_core.decoding.hotwords import HotwordEncoder
from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_transducer.automaton import Automata, Automaton
from oasr_transducer.beam import Beams, BeamStep, Steps
from oasr_transducer.beam_session import HASH, KEPT, LENGTH, LOG_PROB, STATE, BeamSession, Emission, Longs
from oasr_transducer.errors import InvalidLogitsError
from oasr_transducer.joint import Joint
from oasr_transducer.prediction import Prediction, PredictionPool, Predictor
from oasr_transducer.search import Search


class BeamSearch(Search):
    """icefall's modified beam search: at most one token a frame, the best ``beam_size`` hypotheses after each frame.

    The score of a hypothesis is its log probability, that of all its alignments in the beam, plus its context score,
    divided by its tokens and the predictor's start symbols.
    """

    def __init__(
        self, joint: Joint, predictor: Predictor, hotwords: HotwordEncoder, beam_size: int, context_size: int
    ) -> None:
        self._joint = joint
        self._step = BeamStep(joint, predictor)
        self._predictor = predictor
        self._hotwords = hotwords
        self._beam_size = beam_size
        self._context_size = context_size
        self._automata = Automata()
        self.pool = PredictionPool(predictor)

    def validate(self, options: DecodingOptions, mode: Mode) -> None:
        """Refuse more hypotheses than the beam has, and, in strict mode, hotwords that cannot be encoded."""
        if options.n_best > self._beam_size:
            raise RequestRefusedError(
                f"n_best={options.n_best} is refused by decode strategy 'transducer' ({mode}): beam_size is "
                f"{self._beam_size}; ask for fewer, or set a larger beam_size in decode_options."
            )
        self._hotwords.validate(options)

    def open(self, options: DecodingOptions) -> BeamSession:
        """Begin a stream."""
        return BeamSession.begin(options.n_best, self._hotwords.context(options), self._beam_size)

    def close(self, session: Session) -> None:
        """Give the rows back."""
        stream = cast("BeamSession", session)
        self.pool.give_back(stream.rows)
        stream.rows = []

    def advance(self, sessions: Sequence[Session], hidden: Tensor, lengths: Sequence[int], *, keep: bool) -> None:
        """One search for all streams, whatever their hotwords; see :meth:`Search.advance`."""
        order = sorted(range(len(sessions)), key=lambda row: -lengths[row])
        streams = [cast("BeamSession", sessions[row]) for row in order]
        counts = np.array([lengths[row] for row in order], dtype=np.int64)
        encoder = self._joint.project(hidden[torch.tensor(order, device=hidden.device)])
        automaton, roots = self._automata.of([stream.context.graph for stream in streams], hidden.device)
        beams = _upload(streams, roots, hidden.device)
        rows = [row for stream in streams for row in stream.rows or [0] * self._beam_size]
        prediction = self.pool.read(rows, hidden.device)
        beams, prediction, steps = self._search(beams, prediction, encoder, counts, automaton, roots)
        numbers, news, origins = _download(beams, steps, counts, order, [stream.frame_count for stream in streams])
        numbers[:, STATE] -= np.array(roots)[:, None]
        for row, stream in enumerate(streams):
            stream.go_on(numbers[row], origins[row].tolist(), news[row], int(counts[row]))
        if keep:
            for stream in streams:
                stream.rows = stream.rows or self.pool.take(self._beam_size)
            self.pool.write([row for stream in streams for row in stream.rows], prediction)

    def results(self, sessions: Sequence[Session]) -> list[Hypotheses]:
        """The n best of each stream, as if the audio ended here: credit of unfinished phrases is given back."""
        return [stream.result(self._context_size) for stream in cast("Sequence[BeamSession]", sessions)]

    def _search(
        self,
        beams: Beams,
        prediction: Prediction,
        encoder: Tensor,
        counts: Longs,
        automaton: Automaton | None,
        roots: Sequence[int],
    ) -> tuple[Beams, Prediction, list[Steps]]:
        """All frames; streams are sorted by falling length, and those that have ended are left out of the steps."""
        device = encoder.device
        root = torch.tensor(roots, device=device)
        ended: list[tuple[Beams, Prediction]] = []
        steps: list[Steps] = []
        active = len(counts)
        for frame in range(int(counts.max(initial=0))):
            here = int((counts > frame).sum())
            if here < active:
                rows, end = torch.arange(active * self._beam_size, device=device), here * self._beam_size
                done = self._predictor.select(prediction, rows[end:])
                ended.append((Beams(*(value[here:] for value in beams)), done))
                beams, active = Beams(*(value[:here] for value in beams)), here
                prediction = self._predictor.select(prediction, rows[:end])
            beams, prediction, step = self._step.advance(
                beams, prediction, encoder[:active, frame], automaton, root[:active]
            )
            steps.append(step)
        parts = [(beams, prediction), *reversed(ended)]
        joined = Beams(*(torch.cat(values) for values in zip(*(part for part, _ in parts), strict=True)))
        return joined, self._predictor.concat([part for _, part in parts]), steps


def _upload(streams: Sequence[BeamSession], roots: Sequence[int], device: torch.device) -> Beams:
    """The numbers of the streams; a stream's context states begin at its root."""
    matrix = np.stack([stream.numbers for stream in streams], axis=1)
    matrix[STATE] += np.array(roots)[:, None]
    numbers = torch.from_numpy(matrix).to(device)
    return Beams(
        log_prob=numbers[LOG_PROB].view(torch.float64),
        kept=numbers[KEPT].view(torch.float64),
        hash=numbers[HASH],
        length=numbers[LENGTH],
        state=numbers[STATE],
    )


def _download(
    beams: Beams, steps: Sequence[Steps], counts: Longs, order: Sequence[int], begun: Sequence[int]
) -> tuple[Longs, list[list[list[Emission]]], Longs]:
    """Numbers ``(streams, 5, beam)``, the new emissions of every hypothesis, and the old hypothesis of each.

    ``counts`` are the frames of each stream, ``begun`` its frames before, ``order`` its batch row. All comes to the
    host in one copy. Raises :class:`InvalidLogitsError`.
    """
    streams, width = beams.length.shape
    numbers = torch.stack([value.view(torch.int64) for value in beams], dim=1)
    parts = [numbers.flatten()]
    for name in ("parent", "token", "log_prob", "invalid"):
        parts += [_as_long(getattr(step, name)).flatten() for step in steps]
    packed = torch.cat(parts).cpu().numpy()
    here = np.arange(len(steps))[:, None] < counts
    cells = int(here.sum())
    matrix, parents, tokens, bits, invalid = np.split(packed, np.cumsum([numbers.numel(), *[cells * width] * 3]))
    broken = np.zeros(here.shape, bool)
    broken[here] = invalid != 0
    if broken.any():
        raise InvalidLogitsError.of(sorted(order[place] for place in np.flatnonzero(broken.any(axis=0)).tolist()))
    parent = np.tile(np.arange(width), (len(steps), streams, 1))
    token, log_prob = np.full_like(parent, -1), np.zeros_like(parent)
    parent[here], token[here] = parents.reshape(-1, width), tokens.reshape(-1, width)
    log_prob[here] = bits.reshape(-1, width)
    news, origins = _trace(parent, token, log_prob.astype(np.int32).view(np.float32), begun)
    return matrix.reshape(numbers.shape).copy(), news, origins


def _as_long(values: Tensor) -> Tensor:
    return values.float().view(torch.int32).long() if values.is_floating_point() else values.long()


def _trace(
    parent: Longs, token: Longs, log_prob: np.ndarray[tuple[int, ...], np.dtype[np.float32]], begun: Sequence[int]
) -> tuple[list[list[list[Emission]]], Longs]:
    """Walk back from each hypothesis, through arrays ``(frames, streams, beam)``, to the one it began as."""
    _, streams, width = parent.shape
    places = np.tile(np.arange(width), (streams, 1))
    spoken, posteriors = np.empty_like(token), np.empty_like(log_prob)
    for frame in reversed(range(len(parent))):
        spoken[frame] = np.take_along_axis(token[frame], places, axis=1)
        posteriors[frame] = np.take_along_axis(log_prob[frame], places, axis=1)
        places = np.take_along_axis(parent[frame], places, axis=1)
    news: list[list[list[Emission]]] = [[[] for _ in range(width)] for _ in range(streams)]
    frames, rows, columns = np.nonzero(spoken >= 0)
    values = (frames, rows, columns, spoken[frames, rows, columns], posteriors[frames, rows, columns])
    for frame, row, column, said, posterior in zip(*(array.tolist() for array in values), strict=True):
        news[row][column].append(Emission(said, begun[row] + frame, posterior))
    return news, places
