"""Admission prep on a daemon thread (``overlap_admit``): the caller has its id before the waveform is looked at."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class AdmissionThread(Generic[Item]):
    """Calls ``prepare(item)`` for each submitted item, in order, off the caller's thread.

    The thread holds the owner of ``prepare`` only weakly while it waits, so that an engine nobody closed can still go.
    """

    def __init__(self, prepare: Callable[[Item], None]) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._items, weakref.WeakMethod(prepare)), name="oasr-admission", daemon=True
        )
        self._thread.start()

    def submit(self, item: Item) -> None:
        """Queue an item."""
        self._items.put(item)

    def close(self) -> None:
        """Let the thread end behind the items that are queued."""
        self._items.put(None)


def _work(items: queue.SimpleQueue[Item | None], prepare: weakref.WeakMethod[Callable[[Item], None]]) -> None:
    while (item := items.get()) is not None:
        method = prepare()
        if method is None:
            return
        method(item)
        del method
