"""Memory of the search on the GPU, and the launches that work on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from oasr_wfst import triton_kernels as kernels
from oasr_wfst.beam import BeamRules
from oasr_wfst.tokens import Arcs, Doubles, Floats, Ints, Longs

#: Whether kernels run in Triton's interpreter, on the processor (``TRITON_INTERPRET=1`` when Triton was imported).
INTERPRETED: Final = not isinstance(kernels.expand, JITFunction)

#: Programs a lane in the phases that share out positions; positions, or tokens, that a program takes at once.
PROGRAMS: Final = 2 if INTERPRETED else 32
BLOCK: Final = 64 if INTERPRETED else 512

#: The beam is rounded as on the processor, so that both searches prune alike.
COMPILE_OPTIONS: Final = {"enable_fp_fusion": False}

#: Frames between two times that the host takes the records.
PIECE: Final = 64

#: Bytes that a lane takes for each state of the graph, and for each record.
BYTES_PER_STATE: Final = 4
BYTES_PER_RECORD: Final = 40


class DeviceGraph(NamedTuple):
    """The arrays of :class:`~oasr_wfst.tokens.Arcs` on a device."""

    begin: torch.Tensor
    dest: torch.Tensor
    label: torch.Tensor
    score: torch.Tensor
    epsilon_begin: torch.Tensor
    epsilon_arcs: torch.Tensor
    has_epsilons: bool

    @classmethod
    def of(cls, arcs: Arcs, device: torch.device) -> DeviceGraph:
        """A copy of ``arcs``."""

        def copy(array: Ints | Longs | Floats) -> torch.Tensor:
            # from_numpy warns of arrays that are read-only, as a graph's are.
            return torch.tensor(array, device=device)

        return cls(
            copy(arcs.begin), copy(arcs.dest), copy(arcs.label), copy(arcs.score),
            copy(arcs.epsilon_begin), copy(arcs.epsilon_arcs), arcs.has_epsilons,
        )  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What a lane begins a piece with: the tokens of a channel, and rows of one matrix of log posteriors."""

    states: Ints
    scores: Doubles
    beam: float
    step: int
    is_dead: bool
    #: Frames of the whole utterance, -1 where that is not known.
    total: int
    #: Number of the first value of the matrix, within all of them, and the rows to search.
    first_value: int
    frames: Longs


class Drawn(NamedTuple):
    """What a lane ends a piece with; arrays may be those of the lane, and hold until the next piece.

    ``states`` and ``scores`` are those of all records, ``previous`` and ``arcs`` those of the records behind the first
    ``begun``, which are the tokens that the piece began with; ``base`` is the record of the first of the ``active``
    tokens that it ends with. ``trace`` ``(frames searched, 3)`` has the beam, the tokens before and after each frame.
    """

    states: Ints
    scores: Doubles
    previous: Ints
    arcs: Ints
    begun: int
    base: int
    active: int
    beam: float
    step: int
    is_dead: bool
    trace: Doubles
    halted: bool


class Lanes:
    """Working memory of ``count`` lanes with ``room`` records each."""

    def __init__(self, graph: DeviceGraph, rules: BeamRules, count: int, room: int) -> None:
        device = graph.dest.device
        self.count = count
        self.room = room
        self._graph = graph
        self._num_states = len(graph.begin) - 1
        self._rules = torch.tensor(rules, dtype=torch.float64, device=device)

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((count, *shape), dtype=dtype, device=device)

        self._slot = empty(torch.int32, self._num_states).fill_(kernels.NO_TOKEN.value)
        self._states, self._previous, self._arcs = (empty(torch.int32, room) for _ in range(3))
        self._offset, self._chosen, self._queue = (empty(torch.int32, room) for _ in range(3))
        self._scores, self._key = empty(torch.float64, room), empty(torch.int64, room)
        self._counts = empty(torch.int32, PROGRAMS)
        self._best = empty(torch.int64)
        self._beams = empty(torch.float64, 2)
        self._counters = empty(torch.int32, kernels.NUM_COUNTERS.value)
        self._first_value = empty(torch.int64)
        self._frames = empty(torch.int64, PIECE)
        self._trace = empty(torch.float64, PIECE, 3)

    def search(self, loads: Sequence[Load], log_probs: torch.Tensor) -> list[Drawn]:
        """Search a piece, at most :data:`PIECE` frames, of each of at most ``count`` lanes.

        ``log_probs`` ``(..., columns)`` float32, contiguous. A lane that lacked room has stopped before that frame.
        """
        self._put(loads)
        steps = max(len(load.frames) for load in loads)
        with _current(log_probs.device):
            for _ in range(steps):
                self._search_frame(len(loads), log_probs)
        return self._take(loads)

    def _search_frame(self, lanes: int, log_probs: torch.Tensor) -> None:
        graph = self._graph
        sizes = (self.room, self._num_states)
        kernels.begin_frame[(lanes,)](
            graph.begin, self._states, self._offset, self._counters, self._beams, self._best, self._rules, self.room,
            BLOCK=BLOCK, **COMPILE_OPTIONS,
        )  # fmt: skip
        for phase in kernels.PHASES:
            kernels.expand[(PROGRAMS, lanes)](
                graph.begin, graph.dest, graph.label, graph.score, log_probs, self._first_value, self._frames,
                self._slot, self._states, self._scores, self._offset, self._key, self._chosen, self._counts,
                self._counters, self._beams, self._best, *sizes, log_probs.shape[-1], PIECE,
                PHASE=phase, BLOCK=BLOCK, PROGRAMS=PROGRAMS, **COMPILE_OPTIONS,
            )  # fmt: skip
        kernels.end_frame[(lanes,)](
            graph.begin, graph.dest, graph.score, graph.epsilon_begin, graph.epsilon_arcs,
            self._slot, self._states, self._scores, self._previous, self._arcs, self._offset, self._key, self._chosen,
            self._queue, self._counts, self._counters, self._beams, self._best, self._trace, *sizes, PIECE,
            HAS_EPSILONS=graph.has_epsilons, BLOCK=BLOCK, PROGRAMS=PROGRAMS, **COMPILE_OPTIONS,
        )  # fmt: skip

    def _put(self, loads: Sequence[Load]) -> None:
        longest = max(len(load.states) for load in loads)
        states, scores = np.zeros((len(loads), longest), np.int32), np.zeros((len(loads), longest))
        frames = np.zeros((len(loads), PIECE), np.int64)
        counters = np.zeros((len(loads), kernels.NUM_COUNTERS.value), np.int32)
        for lane, load in enumerate(loads):
            active = len(load.states)
            states[lane, :active], scores[lane, :active] = load.states, load.scores
            frames[lane, : len(load.frames)] = load.frames
            numbers = counters[lane]
            numbers[kernels.ACTIVE.value] = numbers[kernels.USED.value] = active
            numbers[kernels.STEP.value], numbers[kernels.DEAD.value] = load.step, load.is_dead
            numbers[kernels.ROWS.value], numbers[kernels.TOTAL.value] = len(load.frames), load.total
        lanes = slice(len(loads))
        self._states[lanes, :longest] = torch.from_numpy(states).to(self._states.device)
        self._scores[lanes, :longest] = torch.from_numpy(scores).to(self._states.device)
        self._frames[lanes] = torch.from_numpy(frames).to(self._states.device)
        self._counters[lanes] = torch.from_numpy(counters).to(self._states.device)
        self._beams[lanes, 0] = self._beams.new_tensor([load.beam for load in loads])
        self._first_value[lanes] = self._first_value.new_tensor([load.first_value for load in loads])

    def _take(self, loads: Sequence[Load]) -> list[Drawn]:
        lanes = slice(len(loads))
        counters = self._counters[lanes].cpu().numpy()
        beams = self._beams[lanes, 0].tolist()
        longest = int(counters[:, kernels.USED.value].max())
        states, previous, arcs, scores = (
            array[lanes, :longest].cpu().numpy() for array in (self._states, self._previous, self._arcs, self._scores)
        )
        trace = self._trace[lanes].cpu().numpy()
        halted = counters[:, kernels.HALTED.value] != 0
        if halted.any():
            self._slot.fill_(kernels.NO_TOKEN.value)
        drawn = []
        for lane, load in enumerate(loads):
            numbers = counters[lane]
            begun, used = len(load.states), int(numbers[kernels.USED.value])
            drawn.append(
                Drawn(
                    states[lane, :used],
                    scores[lane, :used],
                    previous[lane, begun:used],
                    arcs[lane, begun:used],
                    begun,
                    int(numbers[kernels.BASE.value]),
                    int(numbers[kernels.ACTIVE.value]),
                    beams[lane],
                    int(numbers[kernels.STEP.value]),
                    bool(numbers[kernels.DEAD.value]),
                    trace[lane, : numbers[kernels.DONE.value]],
                    bool(halted[lane]),
                )
            )
        return drawn


def on_device(log_probs: Sequence[Floats], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """All matrices ``(frames, columns)`` behind one another, and the number of the first value of each."""
    sizes = [rows.size for rows in log_probs]
    values = torch.from_numpy(np.concatenate(log_probs)).to(device)
    return values, [0, *np.cumsum(sizes).tolist()[:-1]]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
