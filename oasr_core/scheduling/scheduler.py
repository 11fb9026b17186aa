"""The scheduler: three pools, one index, and the age rule. It knows no tensor and no model."""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from oasr_core.request import Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import MicroBatch, PartitionPolicy
from oasr_core.scheduling.policies import BatchingPolicy, Candidate


@dataclass
class SchedulerOutput:
    """What this step works on."""

    newly_admitted: list[Request] = field(default_factory=list)
    running_streams: list[Request] = field(default_factory=list)
    offline_batch: list[Request] = field(default_factory=list)


class WaitingQueue:
    """Requests in queue order (priority, then arrival) and in order of age; every operation is O(1) or O(levels)."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._by_priority: dict[int, OrderedDict[str, Request]] = {}
        self._by_age: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._by_age

    def add(self, request: Request) -> None:
        """Append behind its equals."""
        if request.priority not in self._by_priority:
            insort(self._levels, request.priority)
            self._by_priority[request.priority] = OrderedDict()
        self._by_priority[request.priority][request.request_id] = request
        self._by_age[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take out wherever it stands."""
        level = self._by_priority[request.priority]
        del level[request.request_id]
        del self._by_age[request.request_id]
        if not level:
            del self._by_priority[request.priority]
            self._levels.remove(request.priority)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._by_priority[level].values() for level in self._levels)

    def overdue(self, before: float) -> Iterator[Request]:
        """Requests that arrived at or before ``before``, oldest first."""
        for request in self._by_age.values():
            if request.arrival_time > before:
                return
            yield request


class Scheduler:
    """Decides, once a step, which streams run and which offline requests form the batch."""

    def __init__(
        self,
        options: BatchingOptions,
        batching: BatchingPolicy,
        partition: PartitionPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._batching = batching
        self._partition = partition
        self._clock = clock
        self._arrivals = 0
        self._offline_waiting = WaitingQueue()
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

    @property
    def offline_waiting(self) -> int:
        """Offline requests that wait for a batch."""
        return len(self._offline_waiting)

    def running(self) -> Iterable[Request]:
        """Streams that hold a place, in order of admission."""
        return self._running.values()

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
        self._index[request.request_id] = request
        (self._streaming_waiting if request.streaming else self._offline_waiting).add(request)

    def finish_request(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        request = self._index.pop(request_id)
        if self._running.pop(request_id, None) is None:
            queue = self._streaming_waiting if request.streaming else self._offline_waiting
            if request in queue:
                queue.remove(request)

    def schedule(self) -> SchedulerOutput:
        """Admit streams into free places and choose one offline batch."""
        admitted = self._admit_streams()
        return SchedulerOutput(admitted, list(self._running.values()), self._next_batch())

    def split_offline_batch(self, costs: Sequence[int], encoder_frames: Sequence[int]) -> list[MicroBatch]:
        """Cut a batch into micro-batches; indices refer to the batch's order."""
        return self._partition.split(costs, encoder_frames, self._options)

    def _admit_streams(self) -> list[Request]:
        room = self._options.max_batch_size - len(self._running)
        queue = self._streaming_waiting
        if room <= 0 or not len(queue):
            return []
        chosen = list(islice(queue.overdue(self._clock() - self._options.max_wait_time), room))
        taken = {request.request_id for request in chosen}
        window = room * self._options.length_window_factor + len(chosen)
        others = [request for request in islice(queue, window) if request.request_id not in taken]
        if self._options.streaming_cohort_admit:
            others.sort(key=lambda request: (request.priority, -request.num_frames, request.arrival))
        chosen += others[: room - len(chosen)]
        for request in chosen:
            queue.remove(request)
            self._running[request.request_id] = request
        return chosen

    def _next_batch(self) -> list[Request]:
        queue = self._offline_waiting
        if not len(queue):
            return []
        size = self._options.max_batch_size
        overdue = list(islice(queue.overdue(self._clock() - self._options.max_wait_time), size))
        if overdue:
            batch = self._fill(overdue, queue)
        else:
            window = list(islice(queue, max(self._batching.window(self._options), 1)))
            candidates = [Candidate(r.cost, r.priority, r.arrival) for r in window]
            batch = [window[i] for i in self._checked(self._batching.select(candidates, self._options), len(window))]
        for request in batch:
            queue.remove(request)
        return batch

    def _fill(self, overdue: list[Request], queue: WaitingQueue) -> list[Request]:
        """Overdue requests first, guards skipped; then queue order up to the cap."""
        taken = {request.request_id for request in overdue}
        room = self._options.max_batch_size - len(overdue)
        rest = (request for request in queue if request.request_id not in taken)
        return overdue + list(islice(rest, room))

    def _checked(self, indices: list[int], available: int) -> list[int]:
        """A policy's choice, held to its contract: valid, unique, within the cap, with the head in it."""
        unique = list(dict.fromkeys(indices))
        if not unique or any(not 0 <= i < available for i in unique) or len(unique) > self._options.max_batch_size:
            name = type(self._batching).__name__
            raise ValueError(f"batching policy {name} chose {indices} of {available} candidates")
        return unique if 0 in unique else [0, *unique[: self._options.max_batch_size - 1]]
