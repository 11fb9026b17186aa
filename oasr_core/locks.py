"""A re-entrant lock that nobody can hog: who waits gets it next."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """A re-entrant lock behind a turnstile.

    A loop that releases and takes a plain lock again usually wins against a thread that waits for it. Here a
    waiting thread stands in the turnstile, and the loop has to pass behind it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turnstile = threading.Lock()

    def condition(self) -> threading.Condition:
        """A condition over this lock; waiting on it lets go of the lock."""
        return threading.Condition(self._lock)

    def __enter__(self) -> FairLock:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks its lock, too
            self._lock.acquire()
        else:
            with self._turnstile:
                self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
