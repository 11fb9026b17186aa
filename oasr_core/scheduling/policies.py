"""Batching policies: which waiting offline requests make the next batch (axis ``oasr.batching_policies``).

A policy ranks *candidates*; the scheduler owns the queue and the age rule. Whatever a policy returns, requests that
have waited ``max_wait_time`` go first, oldest first, so a policy can improve a batch but starve nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from oasr_core.scheduling.options import BatchingOptions


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy sees of a waiting request: its cost in feature frames, priority and arrival order."""

    cost: int
    priority: int
    arrival: int


def fits(costs: Sequence[int], options: BatchingOptions) -> bool:
    """Whether a batch of these costs respects the padding and frame guards. A batch of one always does.

    ``max_batch_frames`` bounds longest x batch, ``max_offline_pad_ratio`` that product over the useful frames,
    ``length_bucket_ratio`` shortest/longest from below; 0 switches a guard off.
    """
    if len(costs) <= 1:
        return True
    longest, shortest = max(costs), min(costs)
    padded = longest * len(costs)
    if options.max_batch_frames is not None and padded > options.max_batch_frames:
        return False
    if options.max_offline_pad_ratio > 0 and padded > options.max_offline_pad_ratio * max(sum(costs), 1):
        return False
    return options.length_bucket_ratio <= 0 or shortest >= options.length_bucket_ratio * longest


class BatchingPolicy(ABC):
    """Chooses an offline batch."""

    #: Whether candidates come shortest first (by priority, then cost) instead of in queue order.
    shortest_first: ClassVar[bool] = False

    def window(self, options: BatchingOptions) -> int:
        """How many of the waiting requests :meth:`select` wants to see."""
        return options.max_batch_size

    @abstractmethod
    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """Indices of the next batch: at least one, at most ``max_batch_size``; ``candidates`` are never empty.

        They come in queue order (most urgent, then oldest) or shortest first. What has waited too long is not among
        them: the scheduler serves it first, whatever a policy would do.
        """


class FcfsPolicy(BatchingPolicy):
    """Strict queue order up to the cap."""

    oasr_api = "1.0"

    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """The first ``max_batch_size`` requests, cut where ``max_batch_frames`` would be exceeded."""
        chosen: list[int] = []
        longest = 0
        for index, candidate in enumerate(candidates[: options.max_batch_size]):
            longest = max(longest, candidate.cost)
            if chosen and longest * (len(chosen) + 1) > (options.max_batch_frames or float("inf")):
                break
            chosen.append(index)
        return chosen


class WindowPolicy(BatchingPolicy):
    """The least padded run of lengths that contains the head, among the oldest ``max_batch_size x factor``."""

    oasr_api = "1.0"

    def window(self, options: BatchingOptions) -> int:
        """``max_batch_size x length_window_factor``."""
        return options.max_batch_size * options.length_window_factor

    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """Sort by cost, then slide a run over the head's place; most requests win, then least padding."""
        order = sorted(range(len(candidates)), key=lambda i: (candidates[i].cost, i))
        costs = [candidates[i].cost for i in order]
        prefix = [0, *accumulate(costs)]
        low = order.index(0)  # requests as long as the head are as good as the head: any of their places will do
        high = bisect_right(costs, costs[low]) - 1
        for size in range(min(options.max_batch_size, len(order)), 1, -1):
            runs = [
                (costs[first + size - 1] * size - (prefix[first + size] - prefix[first]), first)
                for first in range(max(0, low - size + 1), min(high, len(order) - size) + 1)
                if fits(costs[first : first + size], options)
            ]
            if runs:
                first = min(runs)[1]
                run = order[first : first + size]
                if 0 not in run:
                    run[max(low, first) - first] = 0
                return sorted(run)
        return [0]


def _fill_from_head(candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
    """The first candidate, then in order whatever keeps the batch within the guards."""
    chosen, costs = [0], [candidates[0].cost]
    for index in range(1, len(candidates)):
        if len(chosen) == options.max_batch_size:
            break
        if fits([*costs, candidates[index].cost], options):
            chosen.append(index)
            costs.append(candidates[index].cost)
    return chosen


class BucketPolicy(BatchingPolicy):
    """The oldest request is the anchor; others join in queue order where the guards allow it."""

    oasr_api = "1.0"

    def window(self, options: BatchingOptions) -> int:
        """``max_batch_size x length_window_factor``."""
        return options.max_batch_size * options.length_window_factor

    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """Greedy fill behind the anchor."""
        return _fill_from_head(candidates, options)


class SjfPolicy(BatchingPolicy):
    """Shortest job first within a priority; the age rule keeps long requests from starving."""

    oasr_api = "1.0"
    shortest_first = True

    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        """Greedy fill behind the shortest of the most urgent."""
        return _fill_from_head(candidates, options)
