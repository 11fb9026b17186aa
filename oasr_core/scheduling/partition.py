"""Partition policies: how an offline batch is cut into micro-batches (axis ``oasr.partition_policies``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from oasr_core.scheduling.options import BatchingOptions


@dataclass(frozen=True)
class MicroBatch:
    """Indices into the batch that share one forward; ``packed`` asks for one gapless row."""

    indices: tuple[int, ...]
    packed: bool = False


class PartitionPolicy(ABC):
    """Cuts a batch."""

    @abstractmethod
    def split(self, costs: Sequence[int], encoder_frames: Sequence[int], options: BatchingOptions) -> list[MicroBatch]:
        """``costs`` in feature frames, ``encoder_frames`` after subsampling; each index appears exactly once."""


def _by_length(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


class CountPartition(PartitionPolicy):
    """One micro-batch, as the batching policy chose it, at most ``max_batch_size`` rows."""

    oasr_api = "1.0"

    def split(self, costs: Sequence[int], encoder_frames: Sequence[int], options: BatchingOptions) -> list[MicroBatch]:
        """Longest first, cut every ``max_batch_size``."""
        order = _by_length(costs)
        size = options.max_batch_size
        return [MicroBatch(tuple(order[i : i + size])) for i in range(0, len(order), size)]


class FramesPartition(PartitionPolicy):
    """Micro-batches whose padded frames stay within ``max_batch_frames``; a single longer request goes alone."""

    oasr_api = "1.0"

    def split(self, costs: Sequence[int], encoder_frames: Sequence[int], options: BatchingOptions) -> list[MicroBatch]:
        """Longest first; the first of a micro-batch sets its width."""
        budget = options.max_batch_frames or max(costs, default=1) * options.max_batch_size
        batches: list[list[int]] = []
        for index in _by_length(costs):
            current = batches[-1] if batches else None
            if current and len(current) < options.max_batch_size and costs[current[0]] * (len(current) + 1) <= budget:
                current.append(index)
            else:
                batches.append([index])
        return [MicroBatch(tuple(batch)) for batch in batches]


class PackingPartition(PartitionPolicy):
    """Gapless rows of at most ``max_packed_frames`` encoder frames; segments never see each other."""

    oasr_api = "1.0"

    def split(self, costs: Sequence[int], encoder_frames: Sequence[int], options: BatchingOptions) -> list[MicroBatch]:
        """First fit, longest first: each row takes what still fits."""
        rows: list[tuple[int, list[int]]] = []
        for index in _by_length(costs):
            frames = encoder_frames[index]
            for place, (used, row) in enumerate(rows):
                if used + frames <= options.max_packed_frames:
                    row.append(index)
                    rows[place] = (used + frames, row)
                    break
            else:
                rows.append((frames, [index]))
        return [MicroBatch(tuple(row), packed=True) for _, row in rows]


def partition_name(options: BatchingOptions) -> str:
    """What ``partition_policy="auto"`` means for these settings."""
    if options.partition_policy != "auto":
        return options.partition_policy
    if options.enable_sequence_packing:
        return "packing"
    return "frames" if options.max_batch_frames is not None else "count"
