"""What ``oasr plugins check`` and ``doctor`` find out about the installed set."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, TypeAlias

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement

from oasr_core._plugins.axes import AXES, CORE_DISTRIBUTION
from oasr_core._plugins.catalogue import Entry, catalogue
from oasr_core._plugins.registry import REGISTRIES, Registry
from oasr_core._plugins.settings import canonical, current_settings
from oasr_core.errors import PluginConflictError, PluginError, did_you_mean
from oasr_core.hooks import Observers

#: A distribution as importlib_metadata finds it (its declared type differs between versions).
Distribution: TypeAlias = Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind, what it is about, and what to do."""

    kind: str
    subject: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class CheckResult:
    """What came of resolving one entry; ``status`` is ok, broken, conflict or blocked."""

    entry: Entry
    status: str
    message: str = ""

    def as_dict(self) -> dict[str, str]:
        """JSON form."""
        entry = self.entry
        return {
            "axis": entry.axis,
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "status": self.status,
            "message": self.message,
        }


def check_all() -> list[CheckResult]:
    """Import and check every entry that the lists allow."""
    results = []
    for registry in REGISTRIES.values():
        entries = registry.entries()
        conflicts = conflicting(registry)
        for entry in entries:
            refusal = registry.refusal(entry)
            if refusal is not None:
                results.append(CheckResult(entry, "blocked", refusal))
                continue
            try:
                obj = registry.get(f"{entry.distribution}:{entry.name}")
                if registry.axis.name == "observers":
                    Observers(installed=False).register(obj, entry.name)
            except PluginError as error:
                results.append(CheckResult(entry, "broken", str(error)))
                continue
            message = conflicts.get(entry.name)
            results.append(CheckResult(entry, "conflict" if message else "ok", message or ""))
    return results


def conflicting(registry: Registry[Any]) -> dict[str, str]:
    """Names that several distributions claim and no preference settles -> the message; nothing is imported."""
    if registry.axis.name == "observers":
        return {}
    conflicts = {}
    for name in registry.names():
        try:
            registry.find(name)
        except PluginConflictError as error:
            conflicts[name] = str(error)
    return conflicts


def diagnose() -> list[Finding]:
    """Look for everything that is wrong with the installed set, without importing a plugin."""
    distributions = [d for d in importlib_metadata.distributions() if _readable(d)]
    return [
        *_duplicates(distributions),
        *_missing_modules(catalogue().entries),
        *_requirements(distributions),
        *_without_entry_points(distributions),
        *_unknown_groups(),
        *(Finding("unmatched-name", "settings", m) for m in current_settings().unmatched(catalogue().entries)),
        *(
            Finding("conflict", f"{registry.axis.name}/{name}", message)
            for registry in REGISTRIES.values()
            for name, message in conflicting(registry).items()
        ),
    ]


def requirement_findings() -> list[Finding]:
    """Distributions whose own requirement on oasr-core is not met (pip can be forced)."""
    return list(_requirements([d for d in importlib_metadata.distributions() if _readable(d)]))


def _readable(distribution: Distribution) -> bool:
    try:
        return bool(distribution.name)
    except Exception:  # damaged metadata of a foreign distribution is not ours to judge
        return False


def _oasr_points(distribution: Distribution) -> list[tuple[str, str, str]]:
    points = sorted((point.group, point.name, point.value) for point in distribution.entry_points)
    return [point for point in points if point[0] == "oasr" or point[0].startswith("oasr.")]


def _requires_core(distribution: Distribution) -> Iterator[Requirement]:
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # a line that pip itself could not read asks for no version of the core
            continue
        if canonical(requirement.name) != CORE_DISTRIBUTION:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _duplicates(distributions: Iterable[Distribution]) -> Iterator[Finding]:
    """Several metadata folders of one distribution: only the first on ``sys.path`` counts, entry points included."""
    copies: dict[str, dict[str, Distribution]] = defaultdict(dict)
    for distribution in distributions:
        copies[canonical(distribution.name)].setdefault(_folder(distribution), distribution)
    for name, found in sorted(copies.items()):
        ours = name == CORE_DISTRIBUTION or any(_oasr_points(d) or list(_requires_core(d)) for d in found.values())
        # A build leaves a second, equal folder beside the sources; only copies that differ can mislead.
        if not ours or len({(d.version, tuple(_oasr_points(d))) for d in found.values()}) < 2:
            continue
        listing = "; ".join(
            f"{folder} (version {d.version}, {len(_oasr_points(d))} oasr entry points)" for folder, d in found.items()
        )
        yield Finding(
            "duplicate-distribution",
            name,
            f"{len(found)} metadata folders on the path, of which only the first counts: {listing}. Delete the stale "
            f"ones, or uninstall {name} until none is left and install it again.",
        )


def _folder(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def _missing_modules(entries: Iterable[Entry]) -> Iterator[Finding]:
    for entry in entries:
        try:
            module = entry.point.module if entry.point else ""
        except ValueError:
            module = ""
        if not module or not module_exists(module):
            yield Finding(
                "missing-module",
                entry.path,
                f"{entry.owner} points to {entry.value!r}, and there is no such module. Install "
                f"{entry.distribution} again.",
            )


def module_exists(name: str) -> bool:
    """Whether a module can be found; no package is imported on the way."""
    top, *rest = name.split(".")
    if top in sys.modules and not rest:
        return True
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return False
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec is not None


def _requirements(distributions: Iterable[Distribution]) -> Iterator[Finding]:
    core = importlib_metadata.version(CORE_DISTRIBUTION)
    seen = set()
    for distribution in distributions:
        name = canonical(distribution.name)
        if name in seen:
            continue
        seen.add(name)
        for requirement in _requires_core(distribution):
            if not requirement.specifier.contains(core, prereleases=True):
                yield Finding(
                    "core-version",
                    distribution.name,
                    f"{distribution.name} {distribution.version} requires {CORE_DISTRIBUTION}{requirement.specifier}, "
                    f"and {core} is installed. Upgrade whichever is older.",
                )


def _without_entry_points(distributions: Iterable[Distribution]) -> Iterator[Finding]:
    """A wheel that was built without its entry points installs well and offers nothing."""
    offering = {canonical(d.name) for d in distributions if _oasr_points(d)}
    for name in sorted({canonical(d.name) for d in distributions if list(_requires_core(d))} - offering):
        if name.startswith("oasr-"):
            yield Finding(
                "no-entry-points", name, f"{name} is named like a plugin and offers none; build its wheel anew."
            )


def _unknown_groups() -> Iterator[Finding]:
    groups = [axis.group for axis in AXES.values()]
    for group, name, distribution in catalogue().unknown_groups:
        yield Finding(
            "unknown-group",
            f"{group}/{name}",
            f"{distribution} offers it in the entry-point group {group!r}, which is no axis."
            f"{did_you_mean(group, groups)}",
        )
