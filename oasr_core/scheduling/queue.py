"""The waiting pool: requests in queue order, by age, and (where a policy wants it) shortest first."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from oasr_core.request import Request

_Key = tuple[int, int, int]


class WaitingQueue:
    """Queue order is priority, then arrival. Adding and removing cost O(log n), looking at the first k costs O(k)."""

    def __init__(self, *, shortest_first: bool = False) -> None:
        self._levels: list[int] = []
        self._by_priority: dict[int, OrderedDict[str, Request]] = {}
        self._by_age: OrderedDict[str, Request] = OrderedDict()
        self._heap: list[_Key] | None = [] if shortest_first else None
        self._by_key: dict[_Key, Request] = {}

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
        if self._heap is not None:
            key = (request.priority, request.cost, request.arrival)
            heappush(self._heap, key)
            self._by_key[key] = request

    def remove(self, request: Request) -> None:
        """Take out wherever it stands."""
        level = self._by_priority[request.priority]
        del level[request.request_id]
        del self._by_age[request.request_id]
        if not level:
            del self._by_priority[request.priority]
            self._levels.remove(request.priority)
        if self._heap is not None:
            del self._by_key[(request.priority, request.cost, request.arrival)]
            if len(self._heap) > 2 * len(self._by_key) + 64:  # removed keys stay until they are the majority
                self._heap = list(self._by_key)
                heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._by_priority[level].values() for level in self._levels)

    def candidates(self) -> Iterator[Request]:
        """In the order that the policy wants: queue order, or shortest first within a priority."""
        return iter(self) if self._heap is None else self._in_heap_order(self._heap)

    def _in_heap_order(self, heap: list[_Key]) -> Iterator[Request]:
        """The live entries in order, without taking them out: a frontier of places, each giving way to its children."""
        while heap and heap[0] not in self._by_key:  # what was served first lies on top
            heappop(heap)
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            key, place = heappop(frontier)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
            if key in self._by_key:
                yield self._by_key[key]

    def overdue(self, before: float) -> Iterator[Request]:
        """Requests that arrived at or before ``before``, oldest first."""
        for request in self._by_age.values():
            if request.arrival_time > before:
                return
            yield request

    def oldest_arrival(self) -> float | None:
        """When the oldest request arrived."""
        return next(iter(self._by_age.values())).arrival_time if self._by_age else None
