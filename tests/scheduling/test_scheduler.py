"""The scheduler: pools, index, admission, and the age rule that no policy can break."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from oasr_core.errors import PluginContractError
from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import CountPartition, MicroBatch
from oasr_core.scheduling.policies import BatchingPolicy, BucketPolicy, Candidate, FcfsPolicy, SjfPolicy, WindowPolicy
from oasr_core.scheduling.scheduler import Scheduler
from oasr_core.testing.clock import FakeClock


def request(name: str, cost: int = 100, *, streaming: bool = False, priority: int = 0) -> Request:
    return Request(name, streaming, DecodingOptions(), priority, num_frames=cost, cost=cost)


def scheduler(policy: BatchingPolicy | None = None, **options) -> tuple[Scheduler, FakeClock]:
    clock = FakeClock()
    return Scheduler(BatchingOptions(**options), policy or FcfsPolicy(), CountPartition(), clock=clock), clock


def names(requests: Sequence[Request]) -> list[str]:
    return [r.request_id for r in requests]


def test_one_offline_batch_per_step_of_at_most_max_batch_size():
    sched, _ = scheduler(max_batch_size=2)
    for name in "abc":
        sched.add(request(name))
    assert names(sched.schedule().offline_batch) == ["a", "b"]
    assert names(sched.schedule().offline_batch) == ["c"]
    assert sched.schedule().offline_batch == []


def test_lower_priority_numbers_go_first_whatever_the_arrival_order():
    sched, _ = scheduler(max_batch_size=1)
    sched.add(request("later", priority=5))
    sched.add(request("default", priority=0))
    sched.add(request("urgent", priority=-1))
    assert [names(sched.schedule().offline_batch)[0] for _ in range(3)] == ["urgent", "default", "later"]


def test_streams_take_free_places_only():
    sched, _ = scheduler(max_batch_size=2)
    for name in "abc":
        sched.add(request(name, streaming=True))
    first = sched.schedule()
    assert len(first.newly_admitted) == len(first.running_streams) == 2
    assert sched.schedule().newly_admitted == []
    sched.finish_request(first.newly_admitted[0].request_id)
    assert len(sched.schedule().newly_admitted) == 1
    assert sched.num_running == 2
    assert sched.num_waiting == 0


def test_cohort_admission_sorts_by_length_and_can_be_switched_off():
    for sort, expected in ((True, ["long", "mid"]), (False, ["short", "long"])):
        sched, _ = scheduler(max_batch_size=2, streaming_cohort_admit=sort)
        for name, cost in (("short", 1), ("long", 900), ("mid", 50)):
            sched.add(request(name, cost, streaming=True))
        assert names(sched.schedule().newly_admitted) == expected


def test_overdue_streams_are_admitted_first_oldest_first():
    sched, clock = scheduler(max_batch_size=1, max_wait_time=0.2)
    sched.add(request("old", 1, streaming=True))
    clock.advance(0.1)
    sched.add(request("older-but-longer", 900, streaming=True))
    clock.advance(0.15)
    assert names(sched.schedule().newly_admitted) == ["old"]


class LatestFirst(BatchingPolicy):
    """A policy that would starve the head."""

    oasr_api = "1.0"

    def window(self, options: BatchingOptions) -> int:
        return 1000

    def select(self, candidates: Sequence[Candidate], options: BatchingOptions) -> list[int]:
        return list(range(len(candidates) - 1, -1, -1))[: options.max_batch_size]


@pytest.mark.parametrize("policy", [FcfsPolicy(), WindowPolicy(), BucketPolicy(), SjfPolicy(), LatestFirst()])
def test_no_policy_lets_a_request_wait_past_the_bound(policy):
    """At load equal to capacity (4 short requests a 50 ms step, batch 4) a long one is in the next batch after
    0.2 s.
    """
    sched, clock = scheduler(policy, max_batch_size=4, max_wait_time=0.2)
    sched.add(request("long", 3000))
    served: dict[str, float] = {}
    arrivals: dict[str, float] = {"long": 0.0}
    for step in range(40):
        for i in range(4):
            name = f"s{step}-{i}"
            arrivals[name] = clock.now
            sched.add(request(name, 50))
        for done in sched.schedule().offline_batch:
            served[done.request_id] = clock.now
            sched.finish_request(done.request_id)
        clock.advance(0.05)
    assert served["long"] <= 0.2 + 0.05
    assert max(served[name] - arrivals[name] for name in served) <= 0.2 + 2 * 0.05


def test_overdue_batch_skips_the_guards_and_fills_in_queue_order():
    sched, clock = scheduler(WindowPolicy(), max_batch_size=3, max_batch_frames=10, max_wait_time=0.2)
    sched.add(request("a", 1000))
    sched.add(request("b", 5))
    clock.advance(0.3)
    sched.add(request("c", 7))
    assert names(sched.schedule().offline_batch) == ["a", "b", "c"]


def test_a_policy_that_fails_costs_its_order_and_is_named(caplog):
    class Wrong(FcfsPolicy):
        def select(self, candidates, options):
            if len(candidates) > 1:
                raise ZeroDivisionError
            return [99]

    sched, _ = scheduler(Wrong(), max_batch_size=2)
    for name in "abc":
        sched.add(request(name))
    with caplog.at_level(logging.ERROR):
        assert names(sched.schedule().offline_batch) == ["a", "b"]
        assert names(sched.schedule().offline_batch) == ["c"]
    assert "ZeroDivisionError" in caplog.text
    assert "batching policy Wrong chose [99] of 1 candidates" in caplog.text


def test_a_partition_has_to_name_each_request_once():
    class Wrong(CountPartition):
        def split(self, costs, encoder_frames, options):
            return [MicroBatch((0, 0))]

    sched = Scheduler(BatchingOptions(), FcfsPolicy(), Wrong())
    with pytest.raises(PluginContractError, match=r"partition policy Wrong gave the indices \[0, 0\] for 2 requests"):
        sched.split_offline_batch([1, 2], [1, 2])


def test_index_follows_a_request_through_all_pools():
    sched, _ = scheduler()
    one, two = request("one", streaming=True), request("two")
    sched.add(one)
    sched.add(two)
    assert sched.find_request("one") is one
    sched.schedule()
    assert sched.find_request("one") is one
    assert sched.find_request("two") is two  # in its batch, until it has its output
    sched.finish_request("one")
    sched.finish_request("two")
    assert sched.find_request("one") is None
    assert sched.requests() == []
    with pytest.raises(KeyError):
        sched.finish_request("one")


def test_a_waiting_request_can_be_finished():
    sched, _ = scheduler(max_batch_size=1)
    for name in "ab":
        sched.add(request(name))
        sched.add(request(name + "s", streaming=True))
    sched.finish_request("b")
    sched.finish_request("bs")
    assert sched.num_waiting == 2
    assert names(sched.schedule().offline_batch) == ["a"]


def test_sjf_serves_the_shortest_of_the_most_urgent():
    sched, _ = scheduler(SjfPolicy(), max_batch_size=2)
    for name, cost, priority in (("long", 90, 0), ("low", 1, 5), ("short", 10, 0), ("mid", 40, 0)):
        sched.add(request(name, cost, priority=priority))
    assert names(sched.schedule().offline_batch) == ["short", "mid"]
    assert names(sched.schedule().offline_batch) == ["long", "low"]


def test_preferred_sizes_snap_down_and_hold():
    sched, clock = scheduler(max_batch_size=8, preferred_batch_size=[2, 4], max_wait_time=0.2)
    for i in range(7):
        sched.add(request(f"r{i}"))
    assert len(sched.schedule().offline_batch) == 4
    assert len(sched.schedule().offline_batch) == 2
    assert sched.schedule().offline_batch == []  # one is left, below the smallest: held
    assert sched.hold_seconds() == pytest.approx(0.2)
    clock.advance(0.1)
    assert sched.hold_seconds() == pytest.approx(0.1)
    clock.advance(0.1)
    assert names(sched.schedule().offline_batch) == ["r6"]
    assert sched.hold_seconds() is None


def test_preferred_sizes_for_streams():
    sched, clock = scheduler(max_batch_size=8, preferred_batch_size=[4], max_wait_time=0.2)
    for i in range(6):
        sched.add(request(f"s{i}", streaming=True))
    assert len(sched.schedule().newly_admitted) == 4
    assert sched.schedule().newly_admitted == []
    clock.advance(0.2)
    assert len(sched.schedule().newly_admitted) == 2


def test_preferred_sizes_respect_the_guards():
    """Of five that wait, the guards let three share a batch: the preferred two of them go."""
    sched, _ = scheduler(WindowPolicy(), max_batch_size=8, preferred_batch_size=[2, 5], length_bucket_ratio=0.9)
    for name, cost in (("a", 100), ("b", 101), ("c", 102), ("d", 500), ("e", 900)):
        sched.add(request(name, cost))
    assert names(sched.schedule().offline_batch) == ["a", "b"]


@pytest.mark.parametrize("policy", [FcfsPolicy(), WindowPolicy(), BucketPolicy(), SjfPolicy(), LatestFirst()])
@pytest.mark.parametrize("streaming", [False, True])
def test_above_capacity_the_overdue_are_served_oldest_first(policy, streaming):
    """Twice the capacity arrives; whoever is overdue is served in order of age, and nobody younger before him."""
    sched, clock = scheduler(policy, max_batch_size=4, max_wait_time=0.19)
    arrivals: dict[str, float] = {}
    count = 0
    for _step in range(60):
        for _ in range(8):
            name = f"r{count}"
            count += 1
            arrivals[name] = clock.now
            sched.add(request(name, 1000 if count % 9 == 0 else 50, streaming=streaming, priority=count % 3))
        output = sched.schedule()
        served = names(output.newly_admitted if streaming else output.offline_batch)
        waiting = [arrivals[r.request_id] for r in sched.requests() if r.request_id not in served]
        overdue_left = [arrival for arrival in waiting if clock.now - arrival >= 0.19]
        if overdue_left:
            assert max(arrivals[name] for name in served) <= min(overdue_left)
        for name in served:
            sched.finish_request(name)
        clock.advance(0.05)
