"""Restricted loading of weights: tensors and plain containers, never code."""

from __future__ import annotations

import argparse
import pathlib
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oasr_core.checkpoints.headers import file_kind, read_safetensors_header, refusal, select_weights
from oasr_core.errors import CheckpointError

#: Objects beside tensors that training scripts store; each only holds the data that it is given.
_ALLOWED: list[Any] = [
    *((pathlib.PurePosixPath, f"{module}.{name}") for module in ("pathlib", "pathlib._local")
      for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *((pathlib.PureWindowsPath, f"{module}.{name}") for module in ("pathlib", "pathlib._local")
      for name in ("WindowsPath", "PureWindowsPath")),
    argparse.Namespace,
]  # fmt: skip
# torch keeps one allow-list for the whole process, so two loads must not enter and leave it at the same time.
_ALLOW_LOCK = threading.Lock()


def load_torch_weights(path: str | Path, key: str | None = None) -> dict[str, Tensor]:
    """Name -> tensor of a torch zip checkpoint, on the CPU and mapped from the file.

    ``key`` selects a mapping inside of a training checkpoint (default: the outermost one with tensors, else ``model``,
    ``state_dict`` or ``model_state_dict``). Raises ``CheckpointError`` naming the file and, where the file asks for a
    class that is not allowed, that class.
    """
    path = Path(path)
    kind = file_kind(path)
    if kind != "torch":
        raise CheckpointError(refusal(path, kind))
    try:
        with _ALLOW_LOCK, torch.serialization.safe_globals(_ALLOWED):
            refused = _refused_globals(path)
            if refused:
                raise CheckpointError(
                    f"{path} asks for objects that could run code: {', '.join(refused)}. Only tensors and plain "
                    "containers are loaded: save the weights alone, torch.save(model.state_dict(), path)."
                )
            root = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # the file is untrusted: whatever torch raises is its fault
        raise CheckpointError(f"{path} cannot be loaded, it is damaged or incomplete: {_first_line(error)}") from error
    return select_weights(root, path, key, lambda value: isinstance(value, Tensor))


def load_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Name -> tensor of a safetensors file, on the CPU and mapped from the file; ``CheckpointError`` where damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    kind = file_kind(path)
    if kind != "safetensors":
        raise CheckpointError(refusal(path, kind))
    read_safetensors_header(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {_first_line(error)}") from error


def _refused_globals(path: Path) -> list[str]:
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
