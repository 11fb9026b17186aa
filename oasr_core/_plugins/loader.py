"""Guarded loading: an entry is imported at most once; its failure is remembered and leaves nothing half-registered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oasr_core._plugins.catalogue import Entry
from oasr_core.errors import PluginError, PluginLoadError

#: Undoes one registration that happened while a plugin was being imported.
Undo = Callable[[], None]


@dataclass
class _Outcome:
    """What came of an entry: not tried (``done`` false), its object, or the error and its cause."""

    # One lock for each entry: another thread that wants the same entry waits, others go on.
    lock: threading.RLock = field(default_factory=threading.RLock)
    loading: bool = False
    done: bool = False
    obj: Any = None
    error: PluginError | None = None


_outcomes: dict[Entry, _Outcome] = {}
_table_lock = threading.Lock()
_thread = threading.local()


def load(entry: Entry, check: Callable[[Any], None]) -> Any:
    """The checked object behind an entry point.

    Raises ``PluginLoadError`` with the cause chained when the import fails in whatever way, and what ``check`` raises
    when the object is refused; both again, without another import, on every later call.
    """
    outcome = _outcome(entry)
    if outcome.done and outcome.error is None:
        return outcome.obj
    with outcome.lock:
        if outcome.loading:
            raise PluginLoadError(
                f"{entry.path} of {entry.owner} asks for itself while {entry.value} is being imported."
            )
        if not outcome.done:
            _attempt(entry, check, outcome)
        if outcome.error is not None:
            raise _again(outcome.error) from outcome.error.__cause__
        return outcome.obj


def failure(entry: Entry) -> PluginError | None:
    """The remembered error of an entry that was tried in this process."""
    return _outcome(entry).error


def loaded(entry: Entry) -> Any:
    """The object of an entry that was loaded in this process, else ``None``."""
    return _outcome(entry).obj


def loaded_entries() -> list[Entry]:
    """Entries whose objects are in use in this process."""
    with _table_lock:
        return [entry for entry, outcome in _outcomes.items() if outcome.done and outcome.error is None]


def forget_failures() -> None:
    """Let entries that failed be tried again."""
    with _table_lock:
        for entry in [entry for entry, outcome in _outcomes.items() if outcome.error is not None]:
            del _outcomes[entry]


def on_rollback(undo: Undo) -> None:
    """Remember how to undo a registration, in case the import that makes it fails later."""
    stack = getattr(_thread, "stack", None)
    if stack:
        stack[-1].append(undo)


def _outcome(entry: Entry) -> _Outcome:
    with _table_lock:
        return _outcomes.setdefault(entry, _Outcome())


def _attempt(entry: Entry, check: Callable[[Any], None], outcome: _Outcome) -> None:
    outcome.loading = True
    try:
        obj = _import(entry)
        check(obj)
        outcome.obj = obj
    except PluginError as error:
        outcome.error = error
    finally:
        outcome.loading = False
    outcome.done = True


def _import(entry: Entry) -> Any:
    """Import and return the object; on any failure undo the registrations made meanwhile."""
    if entry.point is None:
        raise PluginLoadError(f"{entry.path} of {entry.owner} has no entry point.")
    stack = _thread.__dict__.setdefault("stack", [])
    undo: list[Undo] = []
    stack.append(undo)
    try:
        return entry.point.load()
    except BaseException as cause:
        for step in reversed(undo):
            step()
        # SystemExit and the like come from a plugin's own code; only the user's Ctrl-C is the user's.
        if isinstance(cause, KeyboardInterrupt):
            raise
        raise PluginLoadError(
            f"{entry.path} cannot be loaded: the entry point {entry.value!r} of {entry.owner} raised "
            f"{type(cause).__name__}: {cause}. Fix or uninstall {entry.distribution}, or block it with "
            f"OASR_PLUGINS_BLOCK={entry.distribution}."
        ) from cause
    finally:
        stack.pop()


def _again(error: PluginError) -> PluginError:
    """A fresh copy, so that raising it many times does not pile up tracebacks on one object."""
    return type(error)(*error.args)
