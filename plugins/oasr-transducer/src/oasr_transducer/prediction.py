"""Predictor states of many rows, and the pool of those of open streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oasr_core.models.base import TransducerInterface


def reads_are_free(device: torch.device) -> bool:
    """Whether the host sees values at once, so that work may depend on them; else it would wait for the device."""
    return device.type == "cpu"


class Prediction(NamedTuple):
    """Rows of the predictor: its opaque state, and its last output in the joiner's projection ``(rows, joint_dim)``."""

    state: Any
    out: Tensor


class Predictor:
    """The prediction network with its projection."""

    def __init__(self, interface: TransducerInterface) -> None:
        self._predictor = interface.predictor
        self._joiner = interface.joiner
        self._blank_id = int(interface.blank_id)

    def start(self, device: torch.device) -> Prediction:
        """One row: the beginning of an utterance."""
        return self._step(torch.tensor([self._blank_id], device=device), self._predictor.init(1))

    def select(self, rows_of: Prediction, rows: Tensor) -> Prediction:
        """The rows ``rows`` ``(n,)``."""
        return Prediction(self._predictor.select(rows_of.state, rows), rows_of.out.index_select(0, rows))

    def concat(self, parts: Sequence[Prediction]) -> Prediction:
        """All rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        return Prediction(
            self._predictor.concat([part.state for part in parts]), torch.cat([part.out for part in parts])
        )

    def follow(self, before: Prediction, parents: Tensor, tokens: Tensor, speaks: Tensor) -> Prediction:
        """Row ``i`` goes on from row ``parents[i]``: behind ``tokens[i]`` where ``speaks[i]``, else as it is.

        ``tokens`` of the other rows may be any label. The network runs for the rows that speak,
        on a device for all.
        """
        index = parents
        if reads_are_free(speaks.device):
            rows = speaks.nonzero()[:, 0]
            if not len(rows):
                return self.select(before, parents)
            after = self._step(tokens[rows], self._predictor.select(before.state, parents[rows]))
            if len(rows) == len(parents):
                return after
            index = parents.clone()
            index[rows] = torch.arange(len(rows)) + len(before.out)
        else:
            after = self._step(tokens, self._predictor.select(before.state, parents))
            places = torch.arange(len(parents), device=parents.device) + len(before.out)
            index = torch.where(speaks, places, parents)
        return self.select(self.concat([before, after]), index)

    def _step(self, tokens: Tensor, state: Any) -> Prediction:
        out, state = self._predictor.step(tokens, state)
        return Prediction(state, self._joiner.project_predictor(out))


class PredictionPool:
    """Rows of the open streams; row 0 is the beginning of an utterance and never changes."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._rows: Prediction | None = None
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows in use."""
        return 0 if self._rows is None else len(self._rows.out) - 1 - len(self._free)

    def read(self, rows: Sequence[int], device: torch.device) -> Prediction:
        """The rows ``rows``; the first call builds the beginning of an utterance on ``device``."""
        if self._rows is None:
            self._rows = self._predictor.start(device)
        return self._predictor.select(self._rows, torch.tensor(rows, dtype=torch.int64, device=device))

    def write(self, rows: Sequence[int], values: Prediction) -> None:
        """Replace rows that were taken."""
        if self._rows is None:
            raise RuntimeError("the pool has no rows before the first read")
        device = values.out.device
        index = torch.arange(len(self._rows.out), device=device)
        places = torch.tensor(rows, dtype=torch.int64, device=device)
        index[places] = torch.arange(len(rows), device=device) + len(index)
        self._rows = self._predictor.select(self._predictor.concat([self._rows, values]), index)

    def take(self, count: int) -> list[int]:
        """``count`` free rows; the pool at least doubles where it has too few."""
        if self._rows is None:
            raise RuntimeError("the pool has no rows before the first read")
        size = len(self._rows.out)
        more = max(size, count - len(self._free)) if count > len(self._free) else 0
        if more:
            grown = torch.arange(size + more, device=self._rows.out.device)
            self._rows = self._predictor.select(self._rows, torch.where(grown < size, grown, 0))
            self._free += range(size + more - 1, size - 1, -1)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, rows: Sequence[int]) -> None:
        """Rows that a closed stream held."""
        self._free += rows
