"""Which plugins may be used: allow list, block list, preferences and strict mode, from the environment or by call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from oasr_core._plugins.axes import CORE_DISTRIBUTION
from oasr_core._plugins.catalogue import IN_PROCESS, Entry
from oasr_core.errors import PluginSelectionError, did_you_mean

ENV_ALLOW = "OASR_PLUGINS"
ENV_BLOCK = "OASR_PLUGINS_BLOCK"
ENV_PREFER = "OASR_PLUGINS_PREFER"
ENV_STRICT = "OASR_PLUGINS_STRICT"


def canonical(distribution: str) -> str:
    """A distribution's name as the packaging rules compare it: lower case, runs of ``-_.`` as one dash."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True)
class Settings:
    """The selection in force. ``allow`` ``None`` means no allow list; tokens are distributions or ``axis/name``."""

    allow: tuple[str, ...] | None = None
    block: tuple[str, ...] = ()
    prefer: tuple[tuple[str, str], ...] = ()
    strict: bool = False
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)

    def refusal(self, entry: Entry) -> str | None:
        """Why the lists keep ``entry`` out, or ``None`` where it may be used."""
        for token in self.block:
            if _matches(token, entry):
                return f"blocked by {token!r} in {self.origin['block']}"
        if self.allow is None or canonical(entry.distribution) == CORE_DISTRIBUTION:
            return None
        if any(_matches(token, entry) for token in self.allow):
            return None
        return f"not in the allow list of {self.origin['allow']}"

    def preferred(self, axis: str, name: str) -> str | None:
        """The distribution that ``prefer`` names for ``axis/name``."""
        return dict(self.prefer).get(f"{axis}/{name}")

    def unmatched(self, entries: Iterable[Entry]) -> list[str]:
        """One message for each name in the lists or preferences that matches no installed plugin."""
        entries = list(entries)
        known = sorted({canonical(e.distribution) for e in entries} | {e.path for e in entries})
        messages = []
        for label, tokens in (("allow", self.allow or ()), ("block", self.block)):
            for token in tokens:
                if not any(_matches(token, entry) for entry in entries):
                    hint = did_you_mean(token, known)
                    messages.append(f"{self.origin[label]} names {token!r}, which matches no installed plugin.{hint}")
        for path, distribution in self.prefer:
            owners = sorted({e.distribution for e in entries if e.path == path})
            if not owners:
                hint = did_you_mean(path, [e.path for e in entries])
                messages.append(f"{self.origin['prefer']} names {path!r}, which matches no installed plugin.{hint}")
            elif canonical(distribution) not in {canonical(o) for o in [*owners, IN_PROCESS]}:
                messages.append(
                    f"{self.origin['prefer']} prefers {distribution!r} for {path}, which comes from "
                    f"{', '.join(owners)}."
                )
        return messages


def _matches(token: str, entry: Entry) -> bool:
    if "/" in token:
        return token == entry.path
    return canonical(token) == canonical(entry.distribution)


_configured: Settings = Settings()
_configured_fields: frozenset[str] = frozenset()


def configure_plugins(
    *,
    allow: Iterable[str] | None = None,
    block: Iterable[str] | None = None,
    prefer: Mapping[str, str] | None = None,
    strict: bool | None = None,
) -> None:
    """Choose in this process which plugins may be used; what is ``None`` follows the environment.

    ``allow`` and ``block`` hold distributions or ``axis/name``; ``prefer`` maps ``axis/name`` to the distribution that
    wins a conflict; ``strict`` makes names that match nothing and plugins without an API version errors. Each call
    replaces the one before; a call without arguments returns to the environment. A worker process that is spawned
    inherits the environment variables only.
    """
    global _configured, _configured_fields
    given = {"allow": allow, "block": block, "prefer": prefer, "strict": strict}
    fields = frozenset(name for name, value in given.items() if value is not None)
    origin = {name: f"configure_plugins({name}=...)" for name in fields}
    settings = Settings(
        allow=None if allow is None else tuple(allow),
        block=tuple(block or ()),
        prefer=tuple(sorted((prefer or {}).items())),
        strict=bool(strict),
        origin=origin,
    )
    _configured, _configured_fields = settings, fields


def current_settings() -> Settings:
    """What :func:`configure_plugins` set, else what the environment says."""
    environment = _from_environment()
    chosen = {name: getattr(_configured, name) for name in _configured_fields}
    return replace(environment, **chosen, origin={**environment.origin, **_configured.origin})


def _from_environment() -> Settings:
    allow = os.environ.get(ENV_ALLOW)
    prefer = []
    for item in _split(os.environ.get(ENV_PREFER, "")):
        path, separator, distribution = item.partition("=")
        if not separator or not distribution.strip():
            raise PluginSelectionError(
                f"{ENV_PREFER} holds {item!r}; each item is axis/name=distribution, such as "
                "models/conformer=oasr-conformer."
            )
        prefer.append((path.strip(), distribution.strip()))
    return Settings(
        # An empty variable is the shell's way of unsetting one, not a list that allows nothing.
        allow=tuple(_split(allow)) if allow and allow.strip() else None,
        block=tuple(_split(os.environ.get(ENV_BLOCK, ""))),
        prefer=tuple(sorted(prefer)),
        strict=os.environ.get(ENV_STRICT, "").strip().lower() in {"1", "true", "yes", "on"},
        origin={"allow": ENV_ALLOW, "block": ENV_BLOCK, "prefer": ENV_PREFER},
    )


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
