"""Where a checkpoint is: a path, a pretrained name, or a repository of the Hugging Face Hub (torch-free)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from oasr_core.errors import CheckpointError, did_you_mean
from oasr_core.registry import install_hint, registry

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
#: Weights in formats of other frameworks, which no converter reads.
_FOREIGN_WEIGHTS = ["*.msgpack", "*.h5", "*.ot", "*.tflite"]


def locate_checkpoint(ckpt: str | Path) -> Path:
    """A checkpoint's directory or file on this machine.

    ``ckpt`` is, in this order: a path that exists; a name on the ``pretrained`` axis; a Hugging Face Hub id
    ``"org/name"`` or ``"org/name@revision"``, which is downloaded or taken from the local cache. Raises
    ``CheckpointError`` that says what was tried.
    """
    if not str(ckpt).strip():
        raise CheckpointError(f"No checkpoint was given: expected a path, a Hub id, or one of {_pretrained_names()}.")
    path = Path(os.path.expanduser(ckpt))
    if os.path.exists(path):  # unlike Path.exists() false, not an error, for names that no file can have
        return path
    if isinstance(ckpt, str):
        if ckpt.rpartition(":")[2] in registry("pretrained").names():
            return _pretrained_path(ckpt)
        match = _HUB_ID.fullmatch(ckpt)
        if match:
            return download(match["repo"], match["revision"])
    raise CheckpointError(
        f"There is no checkpoint at {str(ckpt)!r}: no such file or directory, no Hugging Face id ('org/name'), and no "
        f"pretrained model of that name (installed: {_pretrained_names()})."
        f"{did_you_mean(str(ckpt), registry('pretrained').names())}{install_hint('pretrained', str(ckpt))}"
    )


def download(repo: str, revision: str | None = None) -> Path:
    """The local snapshot of a Hub repository, by the Hub's own client (``HF_HOME``, ``HF_HUB_OFFLINE``, ... apply)."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, ignore_patterns=_FOREIGN_WEIGHTS))
    except Exception as error:  # the client raises errors of its own, of its transport and of the operating system
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{repo!r} is no path on this machine, and it could not be fetched from the Hugging Face Hub{at}: {reason} "
            f"({type(error).__name__}). Check the name and the network, log in for a private repository ('hf auth "
            f"login'), or give a directory. Pretrained names that are installed: {_pretrained_names()}."
        ) from error


def _pretrained_path(name: str) -> Path:
    model = registry("pretrained").get(name)
    path = Path(model.path())
    if not path.exists():
        raise CheckpointError(
            f"The pretrained model {name!r} says that its checkpoint is {path}, which does not exist: "
            f"reinstall {registry('pretrained').find(name).distribution}."
        )
    return path


def _pretrained_names() -> str:
    return ", ".join(registry("pretrained").names()) or "none"
