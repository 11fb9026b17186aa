"""Keep full garbage collections from walking the engine's constructed heap (process-wide, refcounted)."""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_holders = 0


def acquire() -> None:
    """Collect, then move everything alive to the permanent generation."""
    global _holders
    with _lock:
        gc.collect()
        gc.freeze()
        _holders += 1


def release() -> None:
    """Undo one :func:`acquire`; the last one thaws the heap."""
    global _holders
    with _lock:
        if _holders == 0:
            raise RuntimeError("gc_freeze.release() without acquire()")
        _holders -= 1
        if _holders == 0:
            gc.unfreeze()


def holders() -> int:
    """How many engines hold the heap frozen."""
    return _holders
