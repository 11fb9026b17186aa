"""What a resolved object must be: its axis' API version, base class, members, options classes and method signatures."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from oasr_core._plugins.axes import Axis
from oasr_core._plugins.catalogue import Entry
from oasr_core.errors import PluginContractError, PluginVersionError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class OasrPluginWarning(UserWarning):
    """Something about the installed plugins that deserves attention but breaks nothing."""


def import_contract(reference: str) -> type[Any]:
    """The class behind ``"module:Class"``."""
    module, _, name = reference.partition(":")
    contract: type[Any] = getattr(import_module(module), name)
    return contract


def check_object(axis: Axis, entry: Entry, obj: Any, *, strict: bool) -> None:
    """Refuse ``obj`` unless it fulfils the contract of ``axis`` in a version that this core serves.

    Raises ``PluginVersionError`` or ``PluginContractError``; warns (raises, where ``strict``) for a missing version.
    """
    contract = import_contract(axis.contract) if axis.contract else None
    declared = declared_api(axis, entry, obj, contract)
    if declared is not None:
        _check_version(axis, entry, declared)
    if contract is not None:
        _check_kind(axis, entry, obj, contract)
        cls = obj if isinstance(obj, type) else type(obj)
        check_class(cls, contract, f"{entry.path} of {entry.owner}", required=axis.required)
    if declared is None:
        _report_missing_version(axis, entry, strict)


def declared_api(axis: Axis, entry: Entry, obj: Any, contract: type[Any] | None) -> Any:
    """The version that a plugin states: ``oasr_api`` of the object, else ``OASR_API[axis]`` of its module, or ``None``.

    What the contract class itself carries is not the plugin's statement.
    """
    inherited = () if contract is None else contract.__mro__
    for scope in _scopes(obj):
        if scope not in inherited and "oasr_api" in vars(scope):
            return vars(scope)["oasr_api"]
    for module_name in _modules(entry, obj):
        table = getattr(sys.modules.get(module_name), "OASR_API", None)
        if isinstance(table, Mapping) and axis.name in table:
            return table[axis.name]
    return None


def _scopes(obj: Any) -> Iterator[Any]:
    """The object itself where it has attributes, then the classes that it is made of."""
    if isinstance(obj, type):
        yield from obj.__mro__
        return
    if hasattr(obj, "__dict__"):
        yield obj
    yield from type(obj).__mro__


def _modules(entry: Entry, obj: Any) -> Iterator[str]:
    if inspect.ismodule(obj):
        yield obj.__name__
    elif isinstance(obj, type):
        yield obj.__module__
    if entry.point is not None:
        yield entry.point.module


def _check_version(axis: Axis, entry: Entry, declared: Any) -> None:
    major, separator, minor = declared.partition(".") if isinstance(declared, str) else ("", "", "")
    if not (separator and major.isdigit() and minor.isdigit()):
        raise PluginVersionError(
            f"{entry.path} of {entry.owner} states the API version {declared!r}; expected a string 'major.minor' "
            f"such as {axis.api_text!r}."
        )
    if int(major) == axis.api[0] and int(minor) <= axis.api[1]:
        return
    width = max(len(axis.name), len("Axis"))
    newer = (int(major), int(minor)) > axis.api
    advice = "upgrade oasr-core" if newer else f"upgrade {entry.distribution}"
    raise PluginVersionError(
        f"{entry.path} of {entry.owner} was written for another version of this axis; {advice}.\n"
        f"  {'Axis':<{width}}  Required  Actual\n"
        f"  {axis.name:<{width}}  {declared:<8}  {axis.api_text}"
    )


def _report_missing_version(axis: Axis, entry: Entry, strict: bool) -> None:
    message = (
        f"{entry.path} of {entry.owner} does not state the API version it was written for; its author should put "
        f'oasr_api = "{axis.api_text}" in the class body, or OASR_API = {{"{axis.name}": "{axis.api_text}"}} in the '
        "module."
    )
    if strict:
        raise PluginVersionError(message + " Strict mode refuses it.")
    warnings.warn(message, OasrPluginWarning, stacklevel=2)


def _check_kind(axis: Axis, entry: Entry, obj: Any, contract: type[Any]) -> None:
    where = f"{contract.__module__}.{contract.__qualname__}"
    if axis.kind == "class":
        fulfilled, expected = isinstance(obj, type) and issubclass(obj, contract), "a subclass of"
    else:
        fulfilled, expected = isinstance(obj, contract), "an instance of"
    if not fulfilled:
        got = f"the class {obj.__qualname__}" if isinstance(obj, type) else f"an instance of {type(obj).__qualname__}"
        raise PluginContractError(
            f"{entry.path} of {entry.owner} ({entry.value}) is {got}; the axis {axis.name} takes {expected} {where}."
        )


def check_class(cls: type[Any], contract: type[Any], label: str, *, required: tuple[str, ...] = ()) -> None:
    """Refuse a class that leaves members of ``contract`` out or overrides its methods with other signatures.

    Raises ``PluginContractError`` that begins with ``label`` and names the member, its file and line.
    """
    missing = sorted(getattr(cls, "__abstractmethods__", ())) + [name for name in required if not hasattr(cls, name)]
    if missing:
        raise PluginContractError(
            f"{label}: {cls.__qualname__} lacks {', '.join(missing)}, which {contract.__qualname__} requires "
            f"({_location(cls)})."
        )
    for name in ("options_cls", "request_options_cls"):
        if hasattr(cls, name):
            _check_options(getattr(cls, name), f"{label}: {cls.__qualname__}.{name}")
    for base in contract.__mro__:
        if base.__module__.partition(".")[0] != "oasr_core":
            continue
        for name, declared in vars(base).items():
            if not name.startswith("_") or name == "__init__":
                _check_method(cls, base, name, declared, label)


def _check_options(options: Any, label: str) -> None:
    from pydantic import BaseModel

    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise PluginContractError(f"{label} is {options!r}; options are declared by a pydantic.BaseModel subclass.")


def _check_method(cls: type[Any], contract: type[Any], name: str, declared: Any, label: str) -> None:
    owner = next((klass for klass in cls.__mro__ if name in vars(klass)), contract)
    if owner in contract.__mro__:
        return
    given = vars(owner)[name]
    base, override = _function(declared), _function(given)
    expected = "a property" if isinstance(declared, property) else type(declared).__name__ if base else None
    wrong = (
        (isinstance(declared, property) and override is not None)
        or (base is not None and not callable(given) and override is None)
        or (isinstance(declared, classmethod) and inspect.isfunction(given))
    )
    if wrong:
        raise PluginContractError(
            f"{label}: {owner.__qualname__}.{name} is of type {type(given).__name__}; in the contract "
            f"{contract.__qualname__}.{name} is {expected} ({_location(owner)})."
        )
    if base is None or override is None:
        return
    skip_base, skip_override = (not isinstance(member, staticmethod) for member in (declared, given))
    problem = _signature_problem(_parameters(base, skip_base), _parameters(override, skip_override))
    if problem:
        code = inspect.unwrap(override).__code__
        raise PluginContractError(
            f"{label}: {owner.__qualname__}.{name}{inspect.signature(override)} {problem}; the contract is "
            f"{contract.__qualname__}.{name}{inspect.signature(base)} ({code.co_filename}:{code.co_firstlineno})."
        )


def _function(member: Any) -> Any:
    """The plain function behind a method of any kind, ``None`` for everything else."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def _parameters(function: Any, skip_first: bool) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]


def _signature_problem(base: list[inspect.Parameter], override: list[inspect.Parameter]) -> str | None:
    """What stops a call that is valid for ``base`` from being valid for ``override``.

    Only required parameters count, so that a minor version of an axis may add optional ones.
    """
    positional = [p.name for p in override if p.kind in _POSITIONAL]
    kinds = {p.kind for p in override}
    by_name = {p.name for p in override if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    needed = [p for p in base if p.default is p.empty and p.kind not in _VARIADIC]
    for index, parameter in enumerate(p for p in needed if p.kind in _POSITIONAL):
        if positional[index : index + 1] == [parameter.name]:
            continue
        if index >= len(positional) and inspect.Parameter.VAR_POSITIONAL in kinds:
            continue
        return f"cannot take the parameter {parameter.name!r} in position {index + 1}"
    for parameter in needed:
        if (
            parameter.kind is inspect.Parameter.KEYWORD_ONLY
            and parameter.name not in by_name
            and inspect.Parameter.VAR_KEYWORD not in kinds
        ):
            return f"cannot take the keyword {parameter.name!r}"
    known = {p.name for p in base}
    for parameter in override:
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC and parameter.name not in known:
            return f"requires the parameter {parameter.name!r}, which no caller passes"
    return None


def _location(cls: type[Any]) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__
