"""The waiting pool: requests in queue order, by age, and (where a policy wants it) shortest first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from oasr_core.request import Request

_Key = tuple[int, int, int]


class WaitingQueue:
    """Queue order is priority, then arrival. Adding and removing cost O(log n), looking at the first k costs O(k)."""

    def __init__(self, *, shortest_first: bool = False) -> None:
        self._levels: list[int] = []
        self._by_priority: dict[int, OrderedDict[str, Request]] = {}
        self._by_age: OrderedDict[str, Request] = OrderedDict()
        self._keys: list[_Key] | None = [] if shortest_first else None
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
        if self._keys is not None:
            key = (request.priority, request.cost, request.arrival)
            insort(self._keys, key)
            self._by_key[key] = request

    def remove(self, request: Request) -> None:
        """Take out wherever it stands."""
        level = self._by_priority[request.priority]
        del level[request.request_id]
        del self._by_age[request.request_id]
        if not level:
            del self._by_priority[request.priority]
            self._levels.remove(request.priority)
        if self._keys is not None:
            key = (request.priority, request.cost, request.arrival)
            del self._keys[bisect_left(self._keys, key)]
            del self._by_key[key]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._by_priority[level].values() for level in self._levels)

    def candidates(self) -> Iterator[Request]:
        """In the order that the policy wants: queue order, or shortest first within a priority."""
        return iter(self) if self._keys is None else (self._by_key[key] for key in self._keys)

    def overdue(self, before: float) -> Iterator[Request]:
        """Requests that arrived at or before ``before``, oldest first."""
        for request in self._by_age.values():
            if request.arrival_time > before:
                return
            yield request

    def oldest_arrival(self) -> float | None:
        """When the oldest request arrived."""
        return next(iter(self._by_age.values())).arrival_time if self._by_age else None
