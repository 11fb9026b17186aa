"""Searches of many utterances and streams over one graph, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import numpy as np

from oasr_core.compiled import compilation_announced
from oasr_core.models.base import EncoderOutput
from oasr_wfst import search
from oasr_wfst.beam import DEFAULT_RULES, BeamRules
from oasr_wfst.blanks import BlankSkipper
from oasr_wfst.channel import Channel, Path, Spoken
from oasr_wfst.graph import Graph
from oasr_wfst.history import collect, last_speech, path_to, words_of
from oasr_wfst.lattice import Lattice
from oasr_wfst.log_probs import rows_of
from oasr_wfst.nbest import best_sequences
from oasr_wfst.recorder import LatticeRecorder
from oasr_wfst.tokens import (
    ACTIVE,
    BASE,
    NEEDED,
    NO_ARC,
    ROOT_STEP,
    STEP,
    USED,
    Arcs,
    Doubles,
    Floats,
    Ints,
    Longs,
    Records,
    Scratch,
)

_SMALLEST_RECORDS = 65536
_NO_TRACE: Doubles = np.empty((0, 2))


class Decoder:
    """Time-synchronous beam search with k2's dynamic beam; the best score into each state is exact within the beam.

    Threads take one channel after another; each has its own working memory of 4 bytes for every state of the graph,
    and no result depends on their number.
    """

    def __init__(
        self,
        graph: Graph,
        rules: BeamRules = DEFAULT_RULES,
        *,
        allow_partial: bool = True,
        output_beam: float = 8.0,
        blank: int = 0,
        blank_threshold: float = 1.0,
        threads: int = 1,
    ) -> None:
        """``blank`` is a column of the log posteriors; ``blank_threshold`` is that of ``BlankSkipper``."""
        self.graph = graph
        self.rules = rules
        self.allow_partial = allow_partial
        self.output_beam = output_beam
        self._blank = blank
        self._blank_threshold = blank_threshold
        self._arcs = Arcs.of(graph)
        self._scratches: SimpleQueue[Scratch] = SimpleQueue()
        self._threads = max(threads, 1)
        self._pool: ThreadPoolExecutor | None = None

    def warm_up(self) -> None:
        """Compile everything, or load it from the cache, so that no utterance has to wait for it."""
        with compilation_announced("the graph search", seconds=20):
            channel = self.open(lattice=True)
            self.advance([channel], [np.zeros((1, self.graph.num_columns), np.float32)], whole=True)
            path = self.partial(channel)
            self.final(channel)
            self.alternatives(channel, path, 1)

    def open(self, *, lattice: bool = False) -> Channel:
        """Begin an utterance or a stream; with ``lattice`` its alternatives are kept for :meth:`lattice`."""
        channel = Channel(BlankSkipper(self._blank_threshold, self._blank), self.rules.search_beam, _SMALLEST_RECORDS)
        scratch = self._take()
        while code := search.begin(self._arcs, scratch, channel.records, channel.counters, channel.beam):
            if code == search.TOKENS_FULL:
                scratch = scratch.grown()
            else:
                channel.records = Records.of(2 * len(channel.records.arc))
        self._give_back(channel, scratch)
        if lattice:
            channel.recorder = LatticeRecorder(self._arcs, self.output_beam)
            channel.recorder.add(scratch.slot, channel.states, channel.scores, None)
        return channel

    def advance(
        self,
        channels: Sequence[Channel],
        log_probs: Sequence[Floats],
        *,
        whole: bool = False,
        traces: list[Doubles] | None = None,
    ) -> None:
        """Search the next chunk of each channel: ``log_probs`` ``(frames, labels)`` float32, contiguous.

        ``whole``: the chunk is the whole utterance, and its end is known to the rules of the beam. ``traces`` takes for
        each channel the beam and the active states of every frame searched, ``(frames, 2)``.
        """
        jobs = sorted(zip(channels, log_probs, range(len(channels)), strict=True), key=lambda job: -len(job[1]))
        found: dict[int, Doubles] = {}

        def run(job: tuple[Channel, Floats, int]) -> None:
            channel, rows, index = job
            found[index] = self._search(channel, rows, whole, traces is not None)

        if len(jobs) > 1 and self._threads > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="oasr-wfst")
            list(self._pool.map(run, jobs))
        else:
            for job in jobs:
                run(job)
        if traces is not None:
            traces += [found[index] for index in range(len(channels))]

    def advance_output(self, channels: Sequence[Channel], out: EncoderOutput, *, whole: bool = False) -> None:
        """:meth:`advance` by the log posteriors of an encoder, a row for each channel.

        Raises ``InvalidLogProbsError``, or ``PluginContractError`` for other rows, before any channel has changed.
        """
        self.advance(channels, rows_of(out, len(channels)), whole=whole)

    def partial(self, channel: Channel) -> Path:
        """The best path so far, wherever in the graph it ends."""
        self._collect(channel)
        best = int(np.argmax(channel.scores))
        return self._path(channel, best, None, float(channel.scores[best]), reached_final=False)

    def final(self, channel: Channel) -> Path | None:
        """The best path if the utterance ends here; ``None``: no path that the graph, or ``allow_partial``, accepts.

        With ``allow_partial`` a path that cannot go on, or cannot end, is given with ``reached_final=False``.
        """
        if channel.is_dead:
            if not self.allow_partial:
                return None
            path = self.partial(channel)
            return path._replace(settled=len(path.words))
        place, arc, score, reached = search.end(self._arcs, channel.states, channel.scores)
        if place < 0 or not (reached or self.allow_partial):
            return None
        path = self._path(channel, place, arc if reached else None, score, reached_final=reached)
        return path._replace(settled=len(path.words))

    def lattice(self, channel: Channel) -> Lattice | None:
        """All paths within the output beam if the utterance ends here; ``None`` where :meth:`final` has no final path.

        The channel must have been opened with ``lattice`` and goes on unchanged.
        """
        if channel.recorder is None:
            raise ValueError("lattice of a channel that keeps none; open it with lattice=True")
        if channel.is_dead:
            return None
        place, _, score, reached = search.end(self._arcs, channel.states, channel.scores)
        if place < 0 or not (reached or self.allow_partial):
            return None
        tokens, arcs, scores = search.ends(self._arcs, channel.states, reached)
        recorder = channel.recorder.copy()
        recorder.end(self.graph.num_states - 1, score, tokens, arcs if reached else np.full_like(arcs, NO_ARC), scores)
        return Lattice.of(self.graph, recorder, channel.searched_frames)

    def alternatives(self, channel: Channel, path: Path, count: int) -> list[Path]:
        """Up to ``count`` other word sequences, best first, if the utterance ends here; ``path`` is :meth:`final`'s."""
        lattice = self.lattice(channel) if count > 0 else None
        if lattice is None:
            return []
        found = [each for each in best_sequences(lattice, count + 1) if each.words != path.words]
        return [
            Path(each.words, each.frames, None, each.score, path.reached_final, path.silent_frames)
            for each in found[:count]
        ]

    def _search(self, channel: Channel, rows: Floats, whole: bool, traced: bool) -> Doubles:
        """One channel's chunk, on whichever thread."""
        frames = channel.blanks.frames(rows)
        channel.extend(frames, len(rows))
        trace = np.zeros((len(frames), 2)) if traced else _NO_TRACE
        total = len(frames) if whole else -1
        begun = int(channel.counters[STEP])
        scratch = self._take()
        active = len(channel.states)
        while len(scratch.states) < active:
            scratch = scratch.grown()
        scratch.states[:active], scratch.scores[:active] = channel.states, channel.scores
        # A lattice is recorded frame by frame, from the tokens on both sides.
        stops = [len(frames)] if channel.recorder is None else range(1, len(frames) + 1)
        for stop in stops:
            while code := search.advance(
                self._arcs, scratch, channel.records, channel.counters, channel.beam, rows, frames[:stop],
                int(channel.counters[STEP]) - begun, total, self.rules, trace,
            ):  # fmt: skip
                if code == search.TOKENS_FULL:
                    scratch = scratch.grown()
                else:
                    self._make_room(channel)
            if channel.recorder is not None and not channel.is_dead:
                active = int(channel.counters[ACTIVE])
                channel.recorder.add(
                    scratch.slot, scratch.states[:active], scratch.scores[:active], rows[frames[stop - 1]]
                )
        self._give_back(channel, scratch)
        return trace

    def _take(self) -> Scratch:
        try:
            return self._scratches.get_nowait()
        except Empty:
            return Scratch.of(self.graph.num_states)

    def _give_back(self, channel: Channel, scratch: Scratch) -> None:
        active = int(channel.counters[ACTIVE])
        channel.states, channel.scores = scratch.states[:active].copy(), scratch.scores[:active].copy()
        self._scratches.put(scratch)

    def _make_room(self, channel: Channel) -> None:
        """Drop records that no path needs; where less than half of the room is free then, have twice as much."""
        self._collect(channel)
        used = int(channel.counters[USED])
        filled = used + int(channel.counters[NEEDED])
        if 2 * filled > len(channel.records.arc):
            records = Records.of(4 * filled)
            records.previous[:used], records.arc[:used] = channel.records.previous[:used], channel.records.arc[:used]
            channel.records = records

    def _collect(self, channel: Channel) -> None:
        shared, steps = collect(self._arcs, channel.records, channel.counters)
        channel.settle(self._spoken(shared, steps), self._last_speech(channel, shared, steps, -1))

    def _path(self, channel: Channel, place: int, last_arc: int | None, score: float, *, reached_final: bool) -> Path:
        counters = channel.counters
        path, steps = path_to(self._arcs, channel.records, int(counters[BASE]) + place, int(counters[ROOT_STEP]))
        if last_arc is not None:
            path, steps = np.append(path, np.int32(last_arc)), np.append(steps, counters[STEP])
        words, frames, end_frames = channel.with_words(self._spoken(path, steps))
        spoken = self._last_speech(channel, path, steps, channel.last_speech)
        silent = channel.num_frames - 1 - spoken
        return Path(words, frames, end_frames, score, reached_final, silent, settled=len(channel.words))

    def _spoken(self, path: Ints, steps: Longs) -> Spoken:
        return Spoken(*words_of(self._arcs, path, steps, self.graph.word_begin, self.graph.words, self._blank))

    def _last_speech(self, channel: Channel, path: Ints, steps: Longs, otherwise: int) -> int:
        spoken = last_speech(self._arcs, path, steps, self._blank)
        return otherwise if spoken < 0 else channel.frame_at(spoken)
