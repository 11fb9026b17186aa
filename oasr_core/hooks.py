"""Observers: pluggy hook specifications and the set of observers that an engine notifies.

An observer is told what happens and decides nothing. It is a module, or an object with methods, marked with
:data:`hookimpl`; a distribution offers one through the entry-point group ``oasr``::

    from oasr_core.hooks import hookimpl

    OASR_API = {"observers": "1.0"}

    @hookimpl
    def oasr_request_finished(output):
        print(output.request_id, output.text)
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

from oasr_core._plugins.contract import OasrPluginWarning
from oasr_core._plugins.registry import REGISTRIES
from oasr_core._plugins.settings import current_settings
from oasr_core.errors import PluginContractError, PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oasr_core.request import RequestOutput

hookspec = pluggy.HookspecMarker("oasr")
#: Marks a function or a method as an observer of the hook that has its name.
hookimpl = pluggy.HookimplMarker("oasr")

_log = logging.getLogger(__name__)


class ObserverSpecs:
    """What can be observed. An implementation may leave out arguments that it does not need."""

    @hookspec
    def oasr_engine_started(self, engine: Any) -> None:
        """An engine is ready for requests."""

    @hookspec
    def oasr_engine_stopping(self, engine: Any) -> None:
        """An engine is about to release its resources."""

    @hookspec
    def oasr_request_admitted(self, request_id: str, streaming: bool) -> None:
        """A request was accepted."""

    @hookspec
    def oasr_request_finished(self, output: RequestOutput) -> None:
        """A request ended; ``output`` is its terminal output, whatever its ``finish_reason``."""

    @hookspec
    def oasr_step_done(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """One engine step gave ``outputs`` and took ``seconds`` of wall-clock time."""


_Implementation = tuple[str, Callable[..., object], tuple[str, ...]]


class Observers:
    """The installed observers, and those registered by a call; what one of them raises is contained and counted.

    ``errors`` maps an observer's name to the number of exceptions it raised; ``broken`` maps the name of an installed
    observer that could not be loaded to its error.
    """

    def __init__(self, *, installed: bool = True) -> None:
        self.errors: dict[str, int] = {}
        self.broken: dict[str, PluginError] = {}
        self._manager = pluggy.PluginManager("oasr")
        self._manager.add_hookspecs(ObserverSpecs)
        self._calls: dict[str, tuple[_Implementation, ...]] = {}
        self._lock = threading.Lock()
        if installed:
            self._load_installed()

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add an observer; ``name`` is what ``errors`` counts it under (default: its module's or class's name).

        Raises ``PluginContractError`` for a class, an observer without hooks, or a hook that does not exist or has
        arguments that the specification lacks.
        """
        name = name or str(getattr(plugin, "__name__", type(plugin).__qualname__))
        if isinstance(plugin, type):
            raise PluginContractError(f"The observer {name!r} is a class; register an instance or a module.")
        with self._lock:
            if self._manager.is_registered(plugin):
                return
            try:
                self._manager.register(plugin, name)
                self._check(plugin, name)
            except (pluggy.PluginValidationError, ValueError, PluginContractError) as error:
                if self._manager.is_registered(plugin):
                    self._manager.unregister(plugin)
                raise PluginContractError(f"The observer {name!r} is refused: {error}") from error
            self._refresh()

    def unregister(self, plugin: object) -> None:
        """Remove an observer."""
        with self._lock:
            self._manager.unregister(plugin)
            self._refresh()

    def watches(self, hook: str) -> bool:
        """Whether anybody observes ``hook``, for a caller that would have to compute what it passes."""
        return hook in self._calls

    def notify(self, hook: str, **arguments: object) -> None:
        """Call every observer of ``hook``, the last registered first."""
        for name, function, wanted in self._calls.get(hook, ()):
            try:
                function(*(arguments[argument] for argument in wanted))
            except (Exception, SystemExit):
                with self._lock:
                    self.errors[name] = self.errors.get(name, 0) + 1
                _log.exception("observer %s failed in %s", name, hook)

    def _load_installed(self) -> None:
        registry = REGISTRIES["observers"]
        usable = [entry for entry in registry.entries() if registry.refusal(entry) is None]
        for entry in usable:
            # Observers are not chosen by name, so two distributions may use one name.
            shared = sum(other.name == entry.name for other in usable) > 1
            full = f"{entry.distribution}:{entry.name}"
            name = full if shared else entry.name
            try:
                self.register(registry.get(full), name)
            except PluginError as error:
                if current_settings().strict:
                    raise
                self.broken[name] = error
                warnings.warn(
                    f"The observer {name!r} of {entry.owner} is left out: {error}", OasrPluginWarning, stacklevel=3
                )

    def _check(self, plugin: object, name: str) -> None:
        self._manager.check_pending()
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            raise PluginContractError("it implements no hook; mark its functions with oasr_core.hooks.hookimpl.")
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin and (implementation.hookwrapper or implementation.wrapper):
                    raise PluginContractError(f"{caller.name} is a wrapper; observers decide nothing and wrap nothing.")

    def _refresh(self) -> None:
        calls = {}
        for name in vars(ObserverSpecs):
            if not name.startswith("oasr_"):
                continue
            implementations = getattr(self._manager.hook, name).get_hookimpls()
            if implementations:
                calls[name] = tuple((i.plugin_name, i.function, i.argnames) for i in reversed(implementations))
        self._calls = calls
