"""What is installed: the entry points of every axis, read from package metadata without importing anything."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import importlib_metadata

from oasr_core._plugins.axes import AXES

#: The owner shown for objects that were registered by a call instead of by a distribution.
IN_PROCESS = "in-process"


@dataclass(frozen=True)
class Entry:
    """One claim of a name on an axis: by a distribution's entry point, or by a registration in this process."""

    axis: str
    name: str
    distribution: str
    version: str
    value: str
    point: importlib_metadata.EntryPoint | None = field(default=None, compare=False, repr=False)

    @property
    def path(self) -> str:
        """``axis/name``."""
        return f"{self.axis}/{self.name}"

    @property
    def owner(self) -> str:
        """Distribution and version, as messages show them."""
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True)
class Catalogue:
    """All entries, and the ``oasr.*`` groups that are no axis (``(group, name, distribution)``)."""

    entries: tuple[Entry, ...]
    unknown_groups: tuple[tuple[str, str, str], ...]


_lock = threading.Lock()
_cached: tuple[tuple[str, ...], Catalogue] | None = None


def catalogue() -> Catalogue:
    """The entries of all distributions on ``sys.path``; read once, and again when ``sys.path`` has changed."""
    global _cached
    key = tuple(sys.path)
    with _lock:
        if _cached is None or _cached[0] != key:
            _cached = (key, _scan())
        return _cached[1]


def forget() -> None:
    """Read the metadata anew at the next use."""
    global _cached
    with _lock:
        _cached = None


def _scan() -> Catalogue:
    by_group = {axis.group: axis.name for axis in AXES.values()}
    owners: dict[int, tuple[str, str]] = {}  # parsing a distribution's metadata costs more than all else here
    entries, unknown = [], []
    for point in importlib_metadata.entry_points():
        if point.group != "oasr" and not point.group.startswith("oasr."):
            continue
        if id(point.dist) not in owners:
            owners[id(point.dist)] = _owner(point)
        distribution, version = owners[id(point.dist)]
        axis = by_group.get(point.group)
        if axis is None:
            unknown.append((point.group, point.name, distribution))
        else:
            entries.append(Entry(axis, point.name, distribution, version, point.value, point))
    order = list(AXES)
    entries.sort(key=lambda e: (order.index(e.axis), e.name, e.distribution))
    return Catalogue(tuple(entries), tuple(sorted(unknown)))


def _owner(point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution; damaged metadata of one distribution must not hide the others."""
    distribution = point.dist
    if distribution is None:
        return "unknown", ""
    try:
        metadata = distribution.metadata
        return str(metadata["Name"]), str(metadata["Version"])
    except Exception:
        path = getattr(distribution, "_path", None)
        name, _, version = Path(str(path)).stem.partition("-") if path is not None else ("unknown", "", "")
        return name, version
