"""A look into a checkpoint without torch and without its weights: :class:`CheckpointPeek`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from oasr_core.checkpoints.headers import read_tensor_header, require_content
from oasr_core.checkpoints.inert_pickle import TensorInfo
from oasr_core.errors import CheckpointError, did_you_mean

__all__ = ["CheckpointPeek", "TensorInfo"]

#: Levels of folders that :meth:`CheckpointPeek.files` descends, and how many names it lists at most.
MAX_DEPTH: Final = 3
MAX_FILES: Final = 20_000
#: Text files above this size are not configuration.
MAX_TEXT_BYTES: Final = 64 * 2**20
MAX_YAML_BYTES: Final = 4 * 2**20


class CheckpointPeek:
    """Read-only view of a checkpoint directory, or of a single checkpoint file.

    Converters read everything but the weights through it, in ``detect`` and in ``convert``. Every error is a
    ``CheckpointError`` that names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.exists(self.path):  # unlike Path.exists() false, not an error, for names that no file can have
            raise CheckpointError(f"There is no checkpoint at {self.path}.")

    @property
    def is_directory(self) -> bool:
        """Whether the checkpoint is a directory."""
        return self.path.is_dir()

    @property
    def directory(self) -> Path:
        """The directory that names are relative to: the checkpoint's own, or the one that holds the file."""
        return self.path if self.is_directory else self.path.parent

    def files(self) -> tuple[str, ...]:
        """Relative names (with ``/``) of the checkpoint's files, outer folders first; hidden ones are left out."""
        return self._files

    @cached_property
    def _files(self) -> tuple[str, ...]:
        if not self.is_directory:
            return (self.path.name,)
        names: list[str] = []
        for name in _walk(self.path):
            names.append(name)
            if len(names) == MAX_FILES:
                break
        return tuple(names)

    def exists(self, name: str) -> bool:
        """Whether the checkpoint has a file of this relative name (the name must not leave the checkpoint)."""
        if not self.is_directory:
            return name == self.path.name
        return _is_relative(name) and os.path.isfile(self.path / name)

    def resolve_inside(self, name: str) -> Path:
        """The file that a configuration calls ``name``.

        Configurations carry paths of the machine that trained the model, so the base name beside the configuration is
        tried first, then ``name`` as it stands. Raises ``CheckpointError`` where neither exists or where it lies
        outside of the checkpoint, be it by ``..``, by an absolute path or through a symbolic link (links of a Hugging
        Face cache to its own blobs are followed).
        """
        base = PureWindowsPath(name).name if "\\" in name else PurePosixPath(name).name
        if not base or base == ".." or "\0" in name:
            raise CheckpointError(f"{name!r} names no file; expected a file inside of {self.directory}.")
        found = next((each for each in (base, name) if self.exists(each)), None)
        if found is None:
            if not _is_relative(name):
                raise CheckpointError(
                    f"{name!r} points outside of the checkpoint {self.directory}, and {base!r} is not in it. "
                    "Only files of the checkpoint are read: put the file beside its configuration."
                )
            there = ", ".join(self.files()[:12]) or "no files"
            raise CheckpointError(
                f"{name!r} is not in {self.path} (it has: {there}).{did_you_mean(base, self.files())}"
            )
        return self._checked(found)

    def file(self, name: str) -> Path:
        """The file of exactly this relative name where there is one, else what :meth:`resolve_inside` finds."""
        return self._checked(name) if self.exists(name) else self.resolve_inside(name)

    def _checked(self, name: str) -> Path:
        path = self.directory / name
        self._require_inside(path)
        require_content(path)
        return path

    def _require_inside(self, path: Path) -> None:
        target, root = path.resolve(), self.directory.resolve()
        allowed = [root]
        # huggingface_hub keeps <repo>/snapshots/<revision>/<name> as links to <repo>/blobs/<hash>.
        for parent in (root, *root.parents):
            if parent.parent.name == "snapshots":
                allowed.append(parent.parent.parent / "blobs")
                break
        if not any(target.is_relative_to(directory) for directory in allowed):
            raise CheckpointError(
                f"{path} is a symbolic link to {target}, outside of the checkpoint. "
                "Only files of the checkpoint are read: copy the file, or give the directory that holds it."
            )

    def text(self, name: str) -> str:
        """A UTF-8 text file (a byte order mark is dropped), found by :meth:`file`."""
        return self._read(name, MAX_TEXT_BYTES)

    def json(self, name: str) -> Any:
        """A parsed JSON file."""
        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.directory / name} is not valid JSON: {error or 'nested too deep'}."
            ) from error

    def yaml(self, name: str) -> Any:
        """A parsed YAML file (plain types only: tags that would build objects are refused)."""
        import yaml

        content = self._read(name, MAX_YAML_BYTES)
        try:
            return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.directory / name} is not valid YAML: {_fault(error)}.") from error

    def tensors(self, name: str, key: str | None = None) -> Mapping[str, TensorInfo]:
        """Names, shapes and dtypes of a weights file, from its header alone.

        Torch zip checkpoints and safetensors are understood. In a training checkpoint the mapping under ``model``,
        ``state_dict`` or ``model_state_dict`` is taken; ``key`` names another.
        """
        return read_tensor_header(self.file(name), key)

    def _read(self, name: str, limit: int) -> str:
        path = self.file(name)
        try:
            with path.open("rb") as file:
                content = file.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        if len(content) > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes, which no configuration of a checkpoint is.")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}."
            ) from error


def _fault(error: Exception) -> str:
    """What is wrong with a YAML text, in one line, and in which line of it."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split()) or "nested too deep"
    return f"line {mark.line + 1}: {problem} (column {mark.column + 1})"


def _walk(root: Path) -> Iterator[str]:
    """Relative file names, folder by folder, those near the root first."""
    level = [""]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[str] = []
        for folder in level:
            try:
                entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
            except OSError as error:
                if not folder:
                    raise CheckpointError(f"{root} cannot be listed: {error.strerror or error}.") from error
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    deeper.append(f"{folder}{entry.name}/")
                elif entry.is_file():
                    yield folder + entry.name
        level = deeper


def _is_relative(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    windows = PureWindowsPath(name)
    return not (path.is_absolute() or windows.drive or ".." in path.parts or "\0" in name or not path.parts)
