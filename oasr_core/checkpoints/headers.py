"""Names, shapes and dtypes of the tensors in one file, read from its header alone (torch-free)."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from oasr_core.checkpoints.inert_pickle import TensorInfo, read_structure
from oasr_core.errors import CheckpointError

FileKind = Literal["torch", "torch-legacy", "torchscript", "safetensors", "lfs-pointer", "unknown"]

#: Headers above this size are refused: 64 MiB hold the names of more than 100,000 tensors.
MAX_HEADER_BYTES: Final = 64 * 2**20
#: Where training scripts put the weights when a checkpoint holds more than weights.
WEIGHT_KEYS: Final = ("model", "state_dict", "model_state_dict")

_LFS_PREFIX: Final = b"version https://git-lfs.github.com/spec/"
#: Before PyTorch 1.6 a file began with a pickled magic number.
_LEGACY_PREFIX: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SAFETENSORS_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}

T = TypeVar("T")


def file_kind(path: Path) -> FileKind:
    """What ``path`` holds, by its first bytes (its name says nothing reliable)."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if head.startswith(_LFS_PREFIX):
        return "lfs-pointer"
    if head.startswith(b"PK\x03\x04"):
        return "torchscript" if _is_torchscript(path) else "torch"
    if head.startswith(_LEGACY_PREFIX) or _is_legacy_tar(path, head):
        return "torch-legacy"
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    return "unknown"


def require_content(path: Path) -> None:
    """Raise ``CheckpointError`` with the fix where ``path`` is a Git LFS pointer instead of the file itself."""
    if file_kind(path) == "lfs-pointer":
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: the repository was cloned without its large files. "
            "Run 'git lfs install' and 'git lfs pull' in it, or download the file."
        )


def read_tensor_header(path: Path, key: str | None = None) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of the tensors in a torch zip or safetensors file.

    ``key`` selects a mapping inside of a training checkpoint as :func:`select_weights` does. Raises
    ``CheckpointError`` with file and reason where the file is truncated, malformed or of another kind.
    """
    kind = file_kind(path)
    if kind == "torch":
        return select_weights(_torch_structure(path), path, key, _is_info)
    if kind == "safetensors":
        return read_safetensors_header(path)
    raise CheckpointError(refusal(path, kind))


def refusal(path: Path, kind: FileKind) -> str:
    """Why the tensors of ``path`` cannot be read, and what to do."""
    if kind == "lfs-pointer":
        require_content(path)
    if kind == "torch-legacy":
        return (
            f"{path} is in the legacy torch format (before PyTorch 1.6, tar or bare pickle), which is not read. "
            "Save it again: torch.save(torch.load(old, map_location='cpu', weights_only=True), new)."
        )
    if kind == "torchscript":
        return (
            f"{path} is a TorchScript program (torch.jit.save), not a set of weights. "
            "Give the training checkpoint that it was exported from."
        )
    size = path.stat().st_size
    return (
        f"{path} ({size} bytes) is neither a torch zip checkpoint nor a safetensors file. "
        "It may be truncated or a failed download (an HTML page); compare its size and fetch it again."
    )


def select_weights(root: object, path: Path, key: str | None, is_tensor: Callable[[object], bool]) -> dict[str, Any]:
    """The mapping of names to tensors inside of what a checkpoint file holds.

    The outermost mapping is taken if it holds tensors, else the one under the first of :data:`WEIGHT_KEYS`; ``key``
    names another. Entries that are not tensors are left out. ``CheckpointError`` where there is no such mapping.
    """
    if not isinstance(root, Mapping):
        raise CheckpointError(f"{path} holds a {type(root).__name__}, expected a mapping of names to tensors.")
    candidates = [root] if key is None else []
    candidates += [root[name] for name in ((key,) if key else WEIGHT_KEYS) if isinstance(root.get(name), Mapping)]
    for candidate in candidates:
        tensors = {name: value for name, value in candidate.items() if isinstance(name, str) and is_tensor(value)}
        if tensors:
            return tensors
    wanted = f"under {key!r}" if key else f"at the top or under any of {', '.join(WEIGHT_KEYS)}"
    found = ", ".join(sorted(str(name) for name in root)[:12]) or "nothing"
    raise CheckpointError(f"{path} has no tensors {wanted}; it holds: {found}.")


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Shapes and dtypes of a safetensors file; its length is checked against what the header promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is not a whole safetensors file: it announces a header of {length} bytes and has {size} "
                f"bytes (headers up to {MAX_HEADER_BYTES} bytes are read). Fetch it again."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _safetensors_entry(name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed safetensors header: {error}. Fetch it again.") from error
    end = 8 + length + max((end for _, end in entries.values()), default=0)
    if end != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header describes {end} bytes, the file has {size}. Fetch it again."
        )
    return {name: info for name, (info, _) in entries.items()}


def _safetensors_entry(name: str, entry: Any) -> tuple[TensorInfo, int]:
    dtype, width = _SAFETENSORS_DTYPES[entry["dtype"]]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has a shape or offsets that are not sizes")
    bytes_needed = width
    for extent in shape:
        bytes_needed *= extent
    if end - begin != bytes_needed:
        raise ValueError(f"tensor {name!r} of shape {shape} occupies {end - begin} bytes instead of {bytes_needed}")
    return TensorInfo(tuple(shape), dtype), end


def _torch_structure(path: Path) -> object:
    def read(archive: zipfile.ZipFile) -> object:
        name = next((name for name in archive.namelist() if name.split("/", 1)[-1] == "data.pkl"), None)
        if name is None:
            raise ValueError("it is a zip archive without data.pkl, so torch.save did not write it")
        if archive.getinfo(name).file_size > MAX_HEADER_BYTES:
            raise ValueError(f"its data.pkl is larger than {MAX_HEADER_BYTES} bytes")
        with archive.open(name) as file:
            return read_structure(file.read(MAX_HEADER_BYTES))

    return _with_zip(path, read)


def _is_torchscript(path: Path) -> bool:
    return _with_zip(path, lambda archive: any(n.split("/", 1)[-1].startswith("code/") for n in archive.namelist()))


def _with_zip(path: Path, read: Callable[[zipfile.ZipFile], T]) -> T:
    try:
        with zipfile.ZipFile(path) as archive:
            return read(archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is a truncated or damaged torch checkpoint: {error}. Fetch it again."
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable torch checkpoint: {error}.") from error


def _is_legacy_tar(path: Path, head: bytes) -> bool:
    # The oldest files are tar archives with these members; a tar archive of another kind is none of them.
    if not head.startswith((b"sys_info", b"pickle", b"storages", b"tensors", b"./")):
        return False
    try:
        with tarfile.open(path, "r:") as archive:
            names = {member.name.removeprefix("./") for member in (archive.next() for _ in range(4)) if member}
    except (tarfile.TarError, OSError):
        return False
    return bool(names & {"storages", "tensors"}) and bool(names & {"pickle", "sys_info"})


def _is_info(value: object) -> bool:
    return isinstance(value, TensorInfo)
