"""The contract of the ``oasr.graph_backends`` axis, and the backend that captures nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Result = TypeVar("Result")


class GraphBackend(ABC):
    """Runs callables, captured by key where the backend can."""

    @abstractmethod
    def run(self, key: Hashable, function: Callable[..., Result], *args: Any) -> Result:
        """Call ``function(*args)``; calls with one key have equal shapes and may be replayed from a capture."""

    @abstractmethod
    def pad_batch(self, rows: int, max_rows: int) -> int:
        """The batch width that ``rows`` rows are padded to."""


class EagerBackend(GraphBackend):
    """No capture and no padding: what the CPU wants."""

    oasr_api = "1.0"

    def run(self, key: Hashable, function: Callable[..., Result], *args: Any) -> Result:
        """Call straight through."""
        return function(*args)

    def pad_batch(self, rows: int, max_rows: int) -> int:
        """As many rows as there are."""
        return rows
