"""The scheduler: three pools, one index, and the age rule. It knows no tensor and no model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from oasr_core.errors import PluginContractError
from oasr_core.request import Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import MicroBatch, PartitionPolicy
from oasr_core.scheduling.policies import BatchingPolicy, Candidate
from oasr_core.scheduling.queue import WaitingQueue

logger = logging.getLogger(__name__)


@dataclass
class SchedulerOutput:
    """What this step works on."""

    newly_admitted: list[Request] = field(default_factory=list)
    running_streams: list[Request] = field(default_factory=list)
    offline_batch: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides, once a step, which streams run and which offline requests form the batch."""

    def __init__(
        self,
        options: BatchingOptions,
        batching: BatchingPolicy,
        partition: PartitionPolicy,
        *,
        admit_window: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``admit_window``: seconds that an offline request waits for others to join its batch, ``max_wait_time`` at
        most.
        """
        self._options = options
        self._batching = batching
        self._partition = partition
        self._admit_window = min(admit_window, options.max_wait_time)
        self._clock = clock
        self._arrivals = 0
        self._offline_waiting = WaitingQueue(shortest_first=batching.shortest_first)
        self._streaming_waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._index: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        """Streams that hold a place."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in both waiting pools."""
        return len(self._offline_waiting) + len(self._streaming_waiting)

    def requests(self) -> list[Request]:
        """Every request that waits or runs."""
        return list(self._index.values())

    def find_request(self, request_id: str) -> Request | None:
        """O(1) look-up of a waiting or running request."""
        return self._index.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request; its arrival is stamped here."""
        request.arrival_time = self._clock()
        request.arrival = self._arrivals
        self._arrivals += 1
        (self._streaming_waiting if request.streaming else self._offline_waiting).add(request)
        self._index[request.request_id] = request

    def finish_request(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        request = self._index.pop(request_id)
        if self._running.pop(request_id, None) is None:
            queue = self._streaming_waiting if request.streaming else self._offline_waiting
            if request in queue:
                queue.remove(request)

    def schedule(self, offline_room: int | None = None) -> SchedulerOutput:
        """Admit streams into free places and choose one offline batch, of at most ``offline_room`` requests."""
        admitted = self._admit_streams()
        room = self._options.max_batch_size if offline_room is None else min(offline_room, self._options.max_batch_size)
        return SchedulerOutput(admitted, list(self._running.values()), self._next_batch(room))

    def split_offline_batch(self, costs: Sequence[int], encoder_frames: Sequence[int]) -> list[MicroBatch]:
        """Cut a batch into micro-batches; indices refer to the batch's order, and each appears exactly once."""
        micro = self._partition.split(costs, encoder_frames, self._options)
        indices = sorted(index for batch in micro for index in batch.indices)
        if indices != list(range(len(costs))):
            raise PluginContractError(
                f"partition policy {type(self._partition).__name__} gave the indices {indices} for {len(costs)} "
                "requests; each has to appear exactly once."
            )
        return micro

    def hold_seconds(self) -> float | None:
        """How long, at most, requests that could run are still held back for a preferred size; ``None``: none is."""
        now, wait = self._clock(), self._options.max_wait_time
        ends: list[float] = []
        offline = self._offline_waiting.oldest_arrival()
        if offline is not None:
            ends.append(offline + (self._admit_window if now - offline < self._admit_window else wait))
        stream = self._streaming_waiting.oldest_arrival()
        if stream is not None and len(self._running) < self._options.max_batch_size:
            ends.append(stream + wait)
        return max(min(ends) - now, 0.0) if ends else None

    def _preferred(self, available: int) -> int:
        """The largest preferred size that ``available`` requests fill; 0 holds them back."""
        sizes = self._options.preferred_batch_size
        if sizes is None:
            return available
        return max((size for size in sizes if size <= available), default=0)

    def _overdue(self, queue: WaitingQueue, room: int) -> list[Request]:
        return list(islice(queue.overdue(self._clock() - self._options.max_wait_time), room))

    def _admit_streams(self) -> list[Request]:
        room = self._options.max_batch_size - len(self._running)
        queue = self._streaming_waiting
        if room <= 0 or not len(queue):
            return []
        chosen = self._overdue(queue, room)
        count = room if chosen else self._preferred(min(room, len(queue)))
        if not count:
            return []
        taken = {request.request_id for request in chosen}
        window = room * self._options.length_window_factor + len(chosen)
        others = [request for request in islice(queue, window) if request.request_id not in taken]
        if self._options.streaming_cohort_admit:
            others.sort(key=lambda request: (request.priority, -request.num_frames, request.arrival))
        chosen += others[: count - len(chosen)]
        for request in chosen:
            queue.remove(request)
            self._running[request.request_id] = request
        return chosen

    def _next_batch(self, room: int) -> list[Request]:
        queue = self._offline_waiting
        oldest = queue.oldest_arrival()
        if oldest is None or room <= 0:
            return []
        if len(queue) < room and self._clock() - oldest < self._admit_window:
            return []
        overdue = self._overdue(queue, room)
        batch = self._fill(overdue, queue, room) if overdue else self._selected(queue, room)
        for request in batch:
            queue.remove(request)
        return batch

    def _fill(self, overdue: list[Request], queue: WaitingQueue, room: int) -> list[Request]:
        """Overdue requests first, guards and preferred sizes skipped; then queue order up to the cap."""
        taken = {request.request_id for request in overdue}
        rest = (request for request in queue if request.request_id not in taken)
        return overdue + list(islice(rest, room - len(overdue)))

    def _selected(self, queue: WaitingQueue, room: int) -> list[Request]:
        """The policy's choice; with preferred sizes, of the largest of them that its guards let it fill."""
        window = list(islice(queue.candidates(), max(self._batching.window(self._options), 1)))
        candidates = [Candidate(r.cost, r.priority, r.arrival) for r in window]
        size = self._preferred(min(room, len(window)))
        while size:
            options = self._options.model_copy(update={"max_batch_size": size})
            chosen = self._choice(candidates, options)
            fitting = self._preferred(len(chosen))
            if fitting == len(chosen):
                return [window[i] for i in chosen]
            size = fitting
        return []

    def _choice(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """The policy's choice, held to its contract; a policy that fails costs its order, not the engine."""
        size = options.max_batch_size
        try:
            indices = list(dict.fromkeys(self._batching.select(candidates, options)))
            if indices and len(indices) <= size and all(0 <= i < len(candidates) for i in indices):
                return indices
            raise PluginContractError(
                f"batching policy {type(self._batching).__name__} chose {indices} of {len(candidates)} candidates; a "
                f"batch holds 1 to {size} of the indices 0 to {len(candidates) - 1}."
            )
        except Exception:
            logger.exception("the batching policy failed; this batch is served in queue order")
            return list(range(min(size, len(candidates))))
