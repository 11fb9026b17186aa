"""Batches for an engine with limited room, and the window in which arrivals are gathered; by the fake clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import CountPartition
from oasr_core.scheduling.policies import BucketPolicy, FcfsPolicy, SjfPolicy, WindowPolicy
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.testing.clock import FakeClock

POLICIES = [FcfsPolicy, WindowPolicy, BucketPolicy, SjfPolicy]


def request(name: str, cost: int = 100, *, streaming: bool = False, priority: int = 0) -> Request:
    return Request(name, streaming, DecodingOptions(), priority, num_frames=cost, cost=cost)


def scheduler(policy=FcfsPolicy, admit_window: float = 0.0, **options) -> tuple[Scheduler, FakeClock]:
    clock = FakeClock()
    batching = BatchingOptions(**options)
    return Scheduler(batching, policy(), CountPartition(), admit_window=admit_window, clock=clock), clock


def names(requests):
    return [each.request_id for each in requests]


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    rooms=st.lists(st.integers(0, 6), min_size=20, max_size=20),
    seed=st.integers(0, 1000),
    preferred=st.sampled_from([None, [2], [1, 4]]),
)
def test_a_batch_never_exceeds_the_room_and_nobody_is_lost(policy, rooms, seed, preferred):
    sched, clock = scheduler(policy, max_batch_size=4, max_wait_time=0.2, preferred_batch_size=preferred)
    rng = random.Random(seed)
    added, served = [], []
    for tick, room in enumerate(rooms):
        for n in range(rng.randrange(4)):
            added.append(f"{tick}-{n}")
            sched.add(request(added[-1], rng.choice([50, 60, 900]), priority=rng.randrange(3)))
        batch = names(sched.schedule(room).offline_batch)
        assert len(batch) <= min(room, 4)
        served += batch
        clock.advance(0.05)
    clock.advance(1.0)
    while sched.num_waiting:  # everybody is overdue: no preferred size and no guard holds anyone back
        batch = names(sched.schedule(3).offline_batch)
        assert 1 <= len(batch) <= 3
        served += batch
    assert sorted(served) == sorted(added)
    assert len(set(served)) == len(served)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_room_offline_requests_wait_and_streams_go_on(policy):
    sched, clock = scheduler(policy)
    sched.add(request("offline"))
    sched.add(request("stream", streaming=True))
    output = sched.schedule(0)
    assert names(output.running_streams) == ["stream"]
    assert output.offline_batch == []
    clock.advance(10)
    assert sched.schedule(0).offline_batch == []
    assert names(sched.schedule(1).offline_batch) == ["offline"]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_overdue_goes_first_into_little_room(policy):
    """One place becomes free a tick: whoever has waited longest takes it, whatever the policy prefers."""
    sched, clock = scheduler(policy, max_batch_size=8, max_wait_time=0.2)
    for n, cost in enumerate((900, 50, 700, 60)):
        sched.add(request(f"old-{n}", cost))
        clock.advance(0.01)
    clock.advance(0.3)
    order = []
    for tick in range(4):
        sched.add(request(f"new-{tick}", 10))
        order += names(sched.schedule(1).offline_batch)
        clock.advance(0.01)
    assert order == [f"old-{n}" for n in range(4)]


def test_room_beyond_the_batch_size_is_no_larger_batch():
    sched, _ = scheduler(max_batch_size=2)
    for name in "abc":
        sched.add(request(name))
    assert names(sched.schedule(100).offline_batch) == ["a", "b"]


def test_the_window_gathers_until_it_is_over():
    sched, clock = scheduler(admit_window=0.05, max_batch_size=4)
    sched.add(request("a"))
    assert sched.schedule(4).offline_batch == []
    clock.advance(0.03)
    sched.add(request("b"))
    assert sched.schedule(4).offline_batch == []  # counted from the oldest
    assert sched.hold_seconds() == pytest.approx(0.02)
    clock.advance(sched.hold_seconds())
    assert names(sched.schedule(4).offline_batch) == ["a", "b"]
    assert sched.hold_seconds() is None


@pytest.mark.parametrize(("room", "count"), [(4, 4), (2, 2), (None, 4)])
def test_a_full_batch_does_not_wait_for_the_window(room, count):
    sched, _ = scheduler(admit_window=0.05, max_batch_size=4)
    for n in range(count - 1):
        sched.add(request(f"r{n}"))
    assert sched.schedule(room).offline_batch == []
    sched.add(request("last"))
    assert len(sched.schedule(room).offline_batch) == count


def test_the_window_does_not_hold_streams():
    sched, _ = scheduler(admit_window=0.05)
    sched.add(request("s", streaming=True))
    assert names(sched.schedule(4).newly_admitted) == ["s"]


def test_the_window_is_no_longer_than_the_longest_wait():
    sched, clock = scheduler(admit_window=10.0, max_wait_time=0.2)
    sched.add(request("a"))
    clock.advance(0.2)
    assert names(sched.schedule(4).offline_batch) == ["a"]


@settings(max_examples=100, deadline=None)
@given(
    window=st.sampled_from([0.0, 0.05, 0.4]),
    preferred=st.sampled_from([None, [4]]),
    arrivals=st.lists(st.tuples(st.floats(0, 0.1), st.booleans()), min_size=1, max_size=8),
    busy=st.integers(0, 3),
)
def test_waiting_as_long_as_the_hold_says_lets_something_go(window, preferred, arrivals, busy):
    """Sleeping :meth:`hold_seconds` between ticks never spins: a hold of nothing is followed by an admission."""
    sched, clock = scheduler(admit_window=window, max_batch_size=4, max_wait_time=0.2, preferred_batch_size=preferred)
    for n in range(busy):
        sched.add(request(f"busy{n}", streaming=True))
    clock.advance(0.3)
    sched.schedule(4)
    for n, (gap, streaming) in enumerate(arrivals):
        clock.advance(gap)
        sched.add(request(f"r{n}", streaming=streaming))
    spins = 0
    while (hold := sched.hold_seconds()) is not None:
        output = sched.schedule(4)
        went = len(output.newly_admitted) + len(output.offline_batch)
        if not went:
            hold = sched.hold_seconds()
            assert hold is not None
            spins = spins + 1 if hold <= 0 else 0
            clock.advance(hold + 1e-9)
        assert spins <= 1
