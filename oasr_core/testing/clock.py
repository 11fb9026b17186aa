"""A clock that tests turn by hand."""

from __future__ import annotations


class FakeClock:
    """Callable like ``time.monotonic``; seconds pass only through :meth:`advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds since the clock's own beginning."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
