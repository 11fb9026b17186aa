"""Partition policies: every request once, budgets kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import CountPartition, FramesPartition, PackingPartition, partition_name


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 3000), max_size=40), budget=st.integers(100, 5000), size=st.integers(1, 16))
def test_each_request_is_in_exactly_one_micro_batch(costs, budget, size):
    options = BatchingOptions(max_batch_size=size, max_batch_frames=budget, max_packed_frames=budget)
    encoder = [cost // 4 for cost in costs]
    for policy in (CountPartition(), FramesPartition(), PackingPartition()):
        batches = policy.split(costs, encoder, options)
        assert sorted(i for batch in batches for i in batch.indices) == list(range(len(costs)))
    for batch in FramesPartition().split(costs, encoder, options):
        picked = [costs[i] for i in batch.indices]
        assert len(picked) == 1 or max(picked) * len(picked) <= budget
        assert len(picked) <= size
    for batch in PackingPartition().split(costs, encoder, options):
        assert batch.packed
        assert len(batch.indices) == 1 or sum(encoder[i] for i in batch.indices) <= budget


def test_auto_follows_the_settings():
    assert partition_name(BatchingOptions()) == "count"
    assert partition_name(BatchingOptions(max_batch_frames=10)) == "frames"
    assert partition_name(BatchingOptions(max_batch_frames=10, enable_sequence_packing=True)) == "packing"
    assert partition_name(BatchingOptions(partition_policy="frames")) == "frames"
    assert BatchingOptions().max_packed_frames == 8192
