"""Batching policies as pure functions of what waits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.policies import BucketPolicy, Candidate, FcfsPolicy, SjfPolicy, WindowPolicy, fits


def waiting(*costs):
    return [Candidate(cost, 0, arrival) for arrival, cost in enumerate(costs)]


def test_fcfs_takes_the_first_up_to_the_cap():
    assert FcfsPolicy().select(waiting(5, 900, 3, 4), BatchingOptions(max_batch_size=3)) == [0, 1, 2]


def test_fcfs_stops_at_the_frame_budget_but_always_ships_the_first():
    options = BatchingOptions(max_batch_size=8, max_batch_frames=100)
    assert FcfsPolicy().select(waiting(500, 1, 1), options) == [0]
    assert FcfsPolicy().select(waiting(30, 50, 10), options) == [0, 1]


def test_window_chooses_the_least_padded_run_around_the_oldest():
    options = BatchingOptions(max_batch_size=3)
    assert WindowPolicy().select(waiting(100, 10, 98, 1000, 101, 12), options) == [0, 2, 4]


def test_window_looks_at_four_batches_by_default():
    assert WindowPolicy().window(BatchingOptions()) == 128
    assert WindowPolicy().window(BatchingOptions(max_batch_size=4, length_window_factor=2)) == 8


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ({"max_batch_frames": 250}, [0, 1]),
        ({"length_bucket_ratio": 0.9}, [0, 1]),
        ({"max_offline_pad_ratio": 1.04}, [0, 1]),
    ],
)
def test_guards_bound_the_run(guard, expected):
    assert WindowPolicy().select(waiting(100, 105, 300), BatchingOptions(max_batch_size=3, **guard)) == expected


def test_guards_off():
    options = BatchingOptions(max_offline_pad_ratio=0)
    assert fits([1, 10_000], options)
    assert not fits([1] * 9 + [1000], BatchingOptions(max_offline_pad_ratio=4.0))
    assert fits([10_000], BatchingOptions(max_batch_frames=10))


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.integers(1, 500), min_size=1, max_size=9),
    size=st.integers(1, 4),
    budget=st.one_of(st.none(), st.integers(100, 2000)),
)
def test_window_is_the_best_of_all_length_runs(costs, size, budget):
    """Most requests first, then least padding, among every admissible run of lengths that has the head in it."""
    options = BatchingOptions(max_batch_size=size, max_batch_frames=budget)
    chosen = WindowPolicy().select(waiting(*costs), options)
    assert 0 in chosen
    assert len(chosen) == len(set(chosen)) <= size

    def padding(batch):
        picked = [costs[i] for i in batch]
        return max(picked) * len(picked) - sum(picked)

    def is_run(batch):
        picked, everything = sorted(costs[i] for i in batch), sorted(costs)
        return any(everything[f : f + len(picked)] == picked for f in range(len(costs)))

    best: tuple[int, int] = (1, 0)
    for count in range(size, 0, -1):
        options_of_size = [
            padding(batch)
            for batch in combinations(range(len(costs)), count)
            if 0 in batch and is_run(batch) and fits([costs[i] for i in batch], options)
        ]
        if options_of_size:
            best = (count, min(options_of_size))
            break
    assert (len(chosen), padding(chosen)) == best


def test_bucket_fills_behind_the_oldest_in_queue_order():
    options = BatchingOptions(max_batch_size=3, length_bucket_ratio=0.5)
    assert BucketPolicy().select(waiting(100, 10, 150, 60, 90), options) == [0, 2, 4]
    assert BucketPolicy().window(options) == 12


def test_sjf_takes_candidates_shortest_first():
    assert SjfPolicy.shortest_first
    assert SjfPolicy().select(waiting(5, 6, 7), BatchingOptions(max_batch_size=2)) == [0, 1]
