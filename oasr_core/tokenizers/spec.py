"""Checks of a :class:`~oasr_core.checkpoints.bundle.TokenizerSpec` that every built-in kind makes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from oasr_core.errors import CheckpointError

OptionsT = TypeVar("OptionsT", bound=BaseModel)


def parse_options(cls: type[OptionsT], kind: str, options: Mapping[str, Any]) -> OptionsT:
    """Validate a tokenizer's options; ``CheckpointError`` names the option and what is allowed."""
    try:
        return cls.model_validate(dict(options))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        allowed = ", ".join(cls.model_fields)
        raise CheckpointError(f"Options of tokenizer {kind!r} are wrong: {faults}. Options are: {allowed}.") from error


def required_file(kind: str, files: Mapping[str, Path], role: str, known: Set[str]) -> Path:
    """The file of ``role``; ``CheckpointError`` where it is absent or another role is unknown."""
    if role not in files or not set(files) <= known:
        raise CheckpointError(
            f"Tokenizer {kind!r} got files {sorted(files)}, needs {role!r} and knows {sorted(known)}: "
            "the converter or the native bundle is at fault."
        )
    return files[role]
