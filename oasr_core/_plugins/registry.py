"""One registry for each axis: names without imports, one entry imported when it is asked for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from sys import modules
from typing import Any, Generic, TypeVar

from oasr_core._plugins import catalogue as installed
from oasr_core._plugins import loader
from oasr_core._plugins.axes import AXES, FIRST_PARTY, PLANNED, Axis
from oasr_core._plugins.catalogue import IN_PROCESS, Entry
from oasr_core._plugins.contract import OasrPluginWarning, check_class, check_object, declared_api, import_contract
from oasr_core._plugins.describe import describe_object
from oasr_core._plugins.settings import Settings, canonical, current_settings
from oasr_core.errors import (
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginSelectionError,
    UnknownPluginError,
    did_you_mean,
)

T = TypeVar("T")


@dataclass
class _Local(Generic[T]):
    """An object registered in this process; ``replaces`` lets it win over installed claims of its name."""

    entry: Entry
    obj: T
    replaces: bool
    checked: bool = False


class Registry(Generic[T]):
    """The plugins of one axis, installed ones and those registered in this process.

    Get one from :func:`oasr_core.registry.registry`. All methods may be called from any thread.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._local: dict[str, _Local[T]] = {}
        # Never held while a plugin is imported, so that importing and registering cannot wait for each other.
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Names that may be used, sorted; nothing is imported."""
        return sorted({entry.name for entry in self.entries() if self.refusal(entry) is None})

    def entries(self) -> list[Entry]:
        """Every claim of a name, those that the lists keep out included; nothing is imported."""
        claims = [entry for entry in installed.catalogue().entries if entry.axis == self.axis.name]
        with self._lock:
            local = list(self._local.values())
        claims += [one.entry for one in local if not any(self._same(one, entry) for entry in claims)]
        return sorted(claims, key=lambda entry: (entry.name, entry.distribution))

    def refusal(self, entry: Entry) -> str | None:
        """Why the allow and block lists keep ``entry`` out; ``None`` where it may be used."""
        return None if entry.distribution == IN_PROCESS else current_settings().refusal(entry)

    def failure(self, entry: Entry) -> PluginError | None:
        """The error of an entry that was tried in this process and is broken."""
        return loader.failure(entry)

    def get(self, name: str) -> T:
        """The object behind ``name`` or ``"distribution:name"``, checked against the contract of the axis.

        Raises ``UnknownPluginError``, ``PluginConflictError``, ``PluginLoadError`` (cause chained),
        ``PluginVersionError``, ``PluginContractError``, or, in strict mode, ``PluginSelectionError``.
        """
        if self.axis.name != "commands":  # `oasr plugins doctor` explains the lists and must run with wrong ones
            report_unmatched()
        return self._object(self.find(name))

    def find(self, name: str) -> Entry:
        """The one claim that :meth:`get` would resolve; nothing is imported."""
        owner, _, key = name.rpartition(":")
        claims = [entry for entry in self.entries() if entry.name == key]
        usable = [entry for entry in claims if self.refusal(entry) is None]
        if owner:
            usable = [entry for entry in usable if canonical(entry.distribution) == canonical(owner)]
        if not usable:
            raise self._unknown(name, key, claims)
        with self._lock:
            local = self._local.get(key)
        if len(usable) > 1 and local is not None and local.replaces:
            return local.entry
        preferred = current_settings().preferred(self.axis.name, key)
        if len(usable) > 1 and preferred is not None:
            usable = [entry for entry in usable if canonical(entry.distribution) == canonical(preferred)] or usable
        if len(usable) > 1:
            raise self._conflict(key, usable)
        return usable[0]

    def register(self, name: str, obj: T, *, replace: bool = False) -> None:
        """Register ``obj`` in this process; it is checked when it is first resolved.

        The same object under the same name again is fine, and so are two names for one object. ``replace`` takes the
        name over from an earlier registration and from installed distributions.

        Raises ``PluginConflictError`` when the name is registered for another object in this process.
        """
        if not name or ":" in name or "/" in name:
            raise PluginContractError(
                f"{name!r} is no name for a {self.axis.singular}: it must have no ':' and no '/'."
            )
        module = getattr(obj, "__module__", type(obj).__module__)
        value = f"{module}:{getattr(obj, '__qualname__', type(obj).__qualname__)}"
        new = _Local(Entry(self.axis.name, name, IN_PROCESS, "", value), obj, replace)
        with self._lock:
            old = self._local.get(name)
            if old is not None and old.obj is obj:
                old.replaces = old.replaces or replace
                return
            if old is not None and not replace:
                raise PluginConflictError(
                    f"{new.entry.path} is already registered in this process for {old.entry.value}, and {value} wants "
                    "the same name. Choose another name, unregister the first one, or pass replace=True."
                )
            self._local[name] = new
        loader.on_rollback(partial(self._restore, name, new, old))

    def unregister(self, name: str) -> None:
        """Take back a registration made in this process (an installed plugin is kept out with the block list)."""
        with self._lock:
            if self._local.pop(name, None) is not None:
                return
        raise UnknownPluginError(
            f"{self.axis.name}/{name} is not registered in this process; an installed plugin is kept out by "
            f"OASR_PLUGINS_BLOCK={self.axis.name}/{name}."
        )

    @contextmanager
    def override(self, name: str, obj: T) -> Iterator[T]:
        """Let ``name`` mean ``obj`` inside the block, whatever is registered or installed under it."""
        with self._lock:
            old = self._local.pop(name, None)
        try:
            self.register(name, obj, replace=True)
            yield obj
        finally:
            with self._lock:
                self._local.pop(name, None)
                if old is not None:
                    self._local[name] = old

    def describe(self, name: str) -> dict[str, Any]:
        """Everything there is to know of one plugin, as JSON types; imports it.

        Keys: axis, name, distribution, version, api, entry_point, source, summary, options, request_options.
        """
        obj = self.get(name)
        entry = self.find(name)
        contract = import_contract(self.axis.contract) if self.axis.contract else None
        return {
            "axis": entry.axis,
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "api": declared_api(self.axis, entry, obj, contract),
            "entry_point": entry.value,
            **describe_object(obj, modules.get(entry.point.module) if entry.point else None),
        }

    def check_part(self, name: str, part: str, obj: object) -> None:
        """Refuse an object that a resolved entry built, such as a model's ``encoder``, unless it fulfils its contract.

        Raises ``PluginContractError`` naming the missing member, or the signature that lacks a required parameter.
        """
        entry = self.find(name)
        contract = import_contract(self.axis.parts[part])
        if not isinstance(obj, contract):
            raise PluginContractError(
                f"{entry.path} of {entry.owner}: its {part} is a {type(obj).__name__}, which is no subclass of "
                f"{contract.__module__}.{contract.__qualname__}."
            )
        check_class(type(obj), contract, f"{entry.path} of {entry.owner}, {part}")

    def _object(self, entry: Entry) -> T:
        check = partial(check_object, self.axis, entry, strict=current_settings().strict)
        if entry.distribution != IN_PROCESS:
            obj: T = loader.load(entry, check)
            return obj
        with self._lock:
            local = self._local.get(entry.name)
        if local is None:
            raise self._unknown(entry.name, entry.name, [])
        if not local.checked:
            check(local.obj)
            local.checked = True
        return local.obj

    def _restore(self, name: str, new: _Local[T], old: _Local[T] | None) -> None:
        with self._lock:
            if self._local.get(name) is new:
                del self._local[name]
                if old is not None:
                    self._local[name] = old

    @staticmethod
    def _same(local: _Local[T], entry: Entry) -> bool:
        """Whether an installed entry is the very object that was registered, told without importing anything."""
        if entry.name != local.entry.name or entry.point is None:
            return False
        if entry.value == local.entry.value:
            return True
        try:
            module = modules.get(entry.point.module)
            return module is not None and reduce(getattr, (entry.point.attr or "").split("."), module) is local.obj
        except (AttributeError, ValueError):
            return False

    def _unknown(self, name: str, key: str, claims: list[Entry]) -> UnknownPluginError:
        refused = {entry.owner: self.refusal(entry) for entry in claims}
        reasons = [f"{owner} has it, but it is {reason}" for owner, reason in refused.items() if reason]
        if reasons:
            return UnknownPluginError(f"{self.axis.name}/{key} may not be used: {'; '.join(reasons)}.")
        if claims:
            owners = ", ".join(entry.owner for entry in claims)
            return UnknownPluginError(f"No {self.axis.singular} {name!r}: {self.axis.name}/{key} comes from {owners}.")
        usable = [entry for entry in self.entries() if self.refusal(entry) is None]
        known = ", ".join(f"{entry.name} ({entry.distribution})" for entry in usable) or "none"
        return UnknownPluginError(
            f"No {self.axis.singular} named {name!r}. Installed: {known}."
            f"{did_you_mean(key, [e.name for e in usable])}{install_hint(self.axis.name, key)}"
        )

    def _conflict(self, key: str, claims: list[Entry]) -> PluginConflictError:
        path = f"{self.axis.name}/{key}"
        first = claims[0].distribution
        owners = " and ".join(f"{entry.owner} ({entry.value})" for entry in claims)
        return PluginConflictError(
            f"{path} is claimed by {owners}. Three ways out: uninstall one of them (or block it); prefer one with "
            f"OASR_PLUGINS_PREFER={path}={first}; or ask for it by its full name {first}:{key}."
        )


#: Axis name -> its registry; the only ones in a process.
REGISTRIES: Mapping[str, Registry[Any]] = {name: Registry(axis) for name, axis in AXES.items()}


def install_hint(axis: str, name: str) -> str:
    """``" It comes with X: pip install X"`` where a first-party distribution brings the name, else ``""``."""
    distribution = FIRST_PARTY.get(f"{axis}/{name}")
    if distribution is None:
        return ""
    return f" It comes with {distribution}: {how_to_install(distribution)}"


def how_to_install(distribution: str) -> str:
    """``"pip install X"``, with a reservation for first-party distributions that are planned only."""
    return f"pip install {distribution}" + (", where it is published" if distribution in PLANNED else "")


_reported: tuple[Settings, object] | None = None


def report_unmatched() -> None:
    """Warn, once for each state of settings and ``sys.path``, of names in the lists that match nothing.

    In strict mode raises ``PluginSelectionError`` every time.
    """
    global _reported
    settings, found = current_settings(), installed.catalogue()
    if _reported == (settings, found) and not settings.strict:
        return
    _reported = (settings, found)
    messages = settings.unmatched(found.entries)
    if messages and settings.strict:
        raise PluginSelectionError(" ".join(messages))
    for message in messages:
        warnings.warn(message, OasrPluginWarning, stacklevel=3)
