"""How much decoding one engine step may do."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepBudget:
    """Decoder steps and wall-clock time of one tick; asked before each step, so that time is overrun by one at most."""

    def __init__(
        self, max_steps: int, max_seconds: float | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``max_seconds`` ``None``: only steps are counted. The time runs from here."""
        self._left = max_steps
        self._clock = clock
        self._deadline = None if max_seconds is None else clock() + max_seconds

    def take(self) -> bool:
        """Whether one more step may run; it counts as run."""
        if self.spent:
            return False
        self._left -= 1
        return True

    @property
    def spent(self) -> bool:
        """Whether steps or time are used up."""
        return self._left <= 0 or (self._deadline is not None and self._clock() >= self._deadline)
