"""Beam search on the GPU. Paths, partials and lattices are read on the host, as in the compiled search."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oasr_core.models.base import EncoderOutput
from oasr_wfst.beam import DEFAULT_RULES, BeamRules
from oasr_wfst.channel import Channel
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import Graph
from oasr_wfst.log_probs import posteriors_of, refuse_invalid
from oasr_wfst.recorder import LatticeRecorder
from oasr_wfst.tokens import ACTIVE, BASE, DEAD, NEEDED, STEP, USED, Doubles, Floats, Longs
from oasr_wfst.triton_lanes import BYTES_PER_STATE, PIECE, DeviceGraph, Drawn, Lanes, Load, on_device

#: Records that a lane has room for, at first and at most for the sake of speed.
_SMALLEST_ROOM = 1 << 16
_LARGEST_ROOM = 1 << 18

#: Bytes that tables of one entry for each state may take in all, which bounds the lanes that are searched side by side.
_TABLE_BYTES = 4 << 30


@dataclass
class _Job:
    """A channel's chunk: rows of a matrix that begins with value ``first_value``, of which ``done`` were searched."""

    channel: Channel
    frames: Longs
    first_value: int
    trace: list[Doubles]
    done: int = 0


class TritonDecoder(Decoder):
    """The search of :class:`~oasr_wfst.decoder.Decoder` on the device of the log posteriors, all channels side by side.

    The host waits once every 64 frames, for the records of the tokens. Device memory: the graph, and for each lane 4
    bytes a state and 40 bytes a record. The lattice of a channel that keeps one is made on the host.
    """

    def __init__(
        self,
        graph: Graph,
        rules: BeamRules = DEFAULT_RULES,
        *,
        device: torch.device,
        allow_partial: bool = True,
        output_beam: float = 8.0,
        blank: int = 0,
        blank_threshold: float = 1.0,
    ) -> None:
        """``device`` has to be one that Triton compiles for, or the processor under its interpreter."""
        super().__init__(
            graph, rules,
            allow_partial=allow_partial, output_beam=output_beam, blank=blank, blank_threshold=blank_threshold,
        )  # fmt: skip
        self._device = device
        self._device_graph = DeviceGraph.of(self._arcs, device)
        self._lanes = Lanes(self._device_graph, rules, 1, _SMALLEST_ROOM)
        self._most_lanes = max(_TABLE_BYTES // (BYTES_PER_STATE * graph.num_states), 1)
        self._lock = threading.Lock()

    def advance(
        self,
        channels: Sequence[Channel],
        log_probs: Sequence[Floats],
        *,
        whole: bool = False,
        traces: list[Doubles] | None = None,
    ) -> None:
        """As ``Decoder.advance``; the rows are copied to the device."""
        if not channels:
            return
        frames = [channel.blanks.frames(rows) for channel, rows in zip(channels, log_probs, strict=True)]
        values, first_values = on_device(log_probs, self._device)
        lengths = [len(rows) for rows in log_probs]
        found = self._run(channels, frames, lengths, values, first_values, whole)
        if traces is not None:
            traces += found

    def advance_output(self, channels: Sequence[Channel], out: EncoderOutput, *, whole: bool = False) -> None:
        """As ``Decoder.advance_output``; of the posteriors the host sees the largest of a frame and the blank's."""
        log_probs = _aligned(posteriors_of(out, len(channels)).to(self._device, torch.float32).contiguous())
        lengths = out.lengths.tolist()
        highest = log_probs.amax(-1, keepdim=True).cpu().numpy()
        refuse_invalid([row[:length] for row, length in zip(highest, lengths, strict=True)])
        blanks = log_probs[..., : self._blank + 1].cpu().numpy()
        frames = [
            channel.blanks.frames(row[:length]) for channel, row, length in zip(channels, blanks, lengths, strict=True)
        ]
        size = log_probs[0].numel() if channels else 0
        self._run(channels, frames, lengths, log_probs, [size * row for row in range(len(channels))], whole)

    def _run(
        self,
        channels: Sequence[Channel],
        frames: Sequence[Longs],
        lengths: Sequence[int],
        values: torch.Tensor,
        first_values: Sequence[int],
        whole: bool,
    ) -> list[Doubles]:
        """Search ``frames`` of every channel; returns the beam and the active states of each, ``(frames, 2)``."""
        jobs = []
        for channel, rows, length, first_value in zip(channels, frames, lengths, first_values, strict=True):
            channel.extend(rows, length)
            jobs.append(_Job(channel, rows, first_value, []))
        # Working memory that was made in inference mode cannot be written to outside of it.
        with self._lock, torch.inference_mode():
            waiting = [job for job in jobs if len(job.frames)]
            while waiting:
                for first in range(0, len(waiting), self._most_lanes):
                    self._search_piece(waiting[first : first + self._most_lanes], values, whole)
                waiting = [job for job in waiting if job.done < len(job.frames)]
        return [np.concatenate([np.empty((0, 2)), *job.trace]) for job in jobs]

    def _search_piece(self, jobs: Sequence[_Job], values: torch.Tensor, whole: bool) -> None:
        """At most :data:`PIECE` frames of each job, fewer where room lacks."""
        loads = [
            Load(
                job.channel.states,
                job.channel.scores,
                float(job.channel.beam[0]),
                int(job.channel.counters[STEP]),
                job.channel.is_dead,
                len(job.frames) if whole else -1,
                job.first_value,
                job.frames[job.done : job.done + PIECE],
            )
            for job in jobs
        ]
        self._have_lanes(len(jobs), max(len(load.states) for load in loads))
        drawn = self._lanes.search(loads, values)
        stuck = any(each.halted and not len(each.trace) for each in drawn)
        if stuck or (any(each.halted for each in drawn) and self._lanes.room < _LARGEST_ROOM):
            self._lanes = Lanes(self._device_graph, self.rules, self._lanes.count, 2 * self._lanes.room)
        for job, each in zip(jobs, drawn, strict=True):
            self._store(job.channel, each)
            if job.channel.recorder is not None:
                self._record_lattice(job.channel.recorder, job, each, values)
            job.done += len(each.trace)
            job.trace.append(each.trace[:, :2].copy())

    def _have_lanes(self, count: int, active: int) -> None:
        room = self._lanes.room
        while room < 2 * active:
            room *= 2
        if count > self._lanes.count or room > self._lanes.room:
            self._lanes = Lanes(self._device_graph, self.rules, max(count, self._lanes.count), room)

    def _store(self, channel: Channel, drawn: Drawn) -> None:
        """Append the records of a piece to those of the channel, and have the last tokens of it."""
        counters = channel.counters
        count = len(drawn.arcs)
        if counters[USED] + count > len(channel.records.arc):
            counters[NEEDED] = count
            self._make_room(channel)
        base, used = int(counters[BASE]), int(counters[USED])
        room = slice(used, used + count)
        is_token = drawn.previous < drawn.begun
        channel.records.previous[room] = drawn.previous + np.where(is_token, base, used - drawn.begun)
        channel.records.arc[room] = drawn.arcs
        if count:
            counters[BASE] = used - drawn.begun + drawn.base
        counters[USED], counters[ACTIVE] = used + count, drawn.active
        counters[STEP], counters[DEAD] = drawn.step, drawn.is_dead
        channel.beam[0] = drawn.beam
        tokens = slice(drawn.base, drawn.base + drawn.active)
        channel.states, channel.scores = drawn.states[tokens].copy(), drawn.scores[tokens].copy()

    def _record_lattice(self, recorder: LatticeRecorder, job: _Job, drawn: Drawn, values: torch.Tensor) -> None:
        """The tokens of each frame of a piece, one frame after another, until no path is left."""
        columns = values.shape[-1]
        places = job.first_value // columns + job.frames[job.done : job.done + len(drawn.trace)]
        rows = values.view(-1, columns)[torch.from_numpy(places).to(self._device)].cpu().numpy()
        scratch = self._take()
        first = drawn.begun
        for row, count in zip(rows, drawn.trace[:, 2].astype(int).tolist(), strict=True):
            if not count:
                break
            states, scores = drawn.states[first : first + count], drawn.scores[first : first + count]
            scratch.slot[states] = np.arange(count, dtype=np.int32)
            recorder.add(scratch.slot, states, scores, row)
            first += count
        self._scratches.put(scratch)


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Kernels are compiled for arrays that begin at a multiple of 16 bytes; for others they would be compiled anew."""
    return values if values.data_ptr() % 16 == 0 else values.clone()
