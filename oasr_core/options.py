"""Options of plugins: mappings against the class that declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from oasr_core.errors import ConfigError, did_you_mean

_Options = TypeVar("_Options", bound=BaseModel)


def validated(cls: type[_Options], options: Mapping[str, object], owner: str) -> _Options:
    """``options`` as ``cls``; ``ConfigError`` names ``owner`` and each option that is unknown or not allowed."""
    try:
        return cls.model_validate(dict(options))
    except ValidationError as error:
        known = cls.model_fields
        lines = []
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(f"{name}: no such option.{did_you_mean(name, known)} Known: {', '.join(sorted(known))}")
            else:
                lines.append(f"{name}={problem['input']!r}: {problem['msg']}")
        raise ConfigError(f"options of {owner}: " + "; ".join(lines)) from error
