"""What a plugin's object says about itself: source file, summary and options, as JSON types."""

from __future__ import annotations

import inspect
import json
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def describe_object(obj: Any, module: ModuleType | None) -> dict[str, Any]:
    """Keys source, summary, options and request_options of a resolved object.

    An instance says nothing of itself; ``module``, which its entry point names, speaks for it.
    """
    target = obj if isinstance(obj, type) or inspect.ismodule(obj) else module or type(obj)
    return {
        "source": _source(target),
        "summary": (inspect.getdoc(target) or "").strip().partition("\n")[0],
        "options": _fields(getattr(obj, "options_cls", None)),
        "request_options": _fields(getattr(obj, "request_options_cls", None)),
    }


def _source(target: Any) -> str | None:
    try:
        path = inspect.getsourcefile(target)
        return path if path is None or inspect.ismodule(target) else f"{path}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return None


def _fields(options: Any) -> list[dict[str, Any]]:
    """Name, type, default and meaning of each field of a pydantic class."""
    if options is None:
        return []
    rows = []
    for name, info in options.model_fields.items():
        default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
        rows.append(
            {
                "name": name,
                "type": _type_name(info.annotation),
                "required": info.is_required(),
                "default": _plain(default),
                "description": info.description or "",
            }
        )
    return rows


def _type_name(annotation: Any) -> str:
    """As it is written in source, without modules and without what ``Annotated`` adds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(part) for part in arguments)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if isinstance(origin, type) and arguments and not any(isinstance(part, list) for part in arguments):
        return f"{origin.__name__}[{', '.join('...' if part is ... else _type_name(part) for part in arguments)}]"
    if annotation is None or annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and origin is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value
