"""CTranslate2's ``model.bin``: names, types and places of its variables, checked against the file (torch-free)."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oasr_core.errors import CheckpointError

#: The newest binary version that is understood.
NEWEST_VERSION: Final = 6
#: dtype id -> name and bytes of an item.
_DTYPES: Final[Mapping[int, tuple[str, int]]] = {
    0: ("float32", 4),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("float16", 2),
    5: ("bfloat16", 2),
}
#: Before version 4 a variable states the size of its items instead: size -> name.
_BY_SIZE: Final[Mapping[int, str]] = {4: "float32", 2: "int16", 1: "int8"}
_MAX_RANK: Final = 8
_MAX_NAME: Final = 1024


@dataclass(frozen=True)
class Variable:
    """``size`` bytes at ``offset``, little-endian, in C order; an empty shape is a scalar."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Ct2File:
    """The directory of a ``model.bin``; data is read when it is asked for, through a mapping of the file."""

    path: Path
    version: int
    spec: str
    revision: int
    variables: Mapping[str, Variable]
    data: mmap.mmap = field(repr=False)

    def content(self, variable: Variable) -> bytearray:
        """A copy of the bytes of a variable."""
        return bytearray(self.data[variable.offset : variable.offset + variable.size])

    def scalar(self, name: str) -> int | float | None:
        """The value of a scalar, ``None`` where there is no such variable (versions differ in which they write)."""
        variable = self.variables.get(name)
        if variable is None or variable.size > 8 or math.prod(variable.shape) != 1:
            return None
        code = {"float32": "f", "float16": "e", "int8": "b", "int16": "h", "int32": "i"}.get(variable.dtype)
        return None if code is None else struct.unpack(f"<{code}", self.content(variable))[0]


def read_spec(path: Path) -> str | None:
    """The spec's name where the file begins like CTranslate2's (``"WhisperSpec"``), else ``None``; never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(6 + _MAX_NAME)
    except OSError:
        return None
    if len(head) < 8:
        return None
    version, length = struct.unpack_from("<IH", head)
    name = head[6 : 6 + length]
    if not 2 <= version < 1 << 16 or not name.endswith(b"Spec\0") or not name[:-1].isalnum():
        return None
    return name[:-1].decode("ascii")


def open_ct2(path: Path) -> Ct2File:
    """Read the directory of ``path``.

    Raises ``CheckpointError`` with offset and reason where the file is truncated, corrupt or of a newer version.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return _Reader(path, data).read()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> Ct2File:
        version = self._number("<I", "the binary version")
        if version == 0 or version > NEWEST_VERSION:
            raise CheckpointError(
                f"{self._path} is not a model.bin that is read: byte 0 says binary version {version}, known are 1 to "
                f"{NEWEST_VERSION}. A newer one can be written again by an older ctranslate2; any other number means "
                "that the file is of another kind."
            )
        spec, revision = "", 1
        if version >= 2:
            spec, revision = self._string("the name of the spec"), self._number("<I", "the revision of the spec")
        variables = {}
        for _ in range(self._number("<I", "the number of variables")):
            name, variable = self._variable(version)
            variables[name] = variable
        if version >= 3:
            self._aliases(variables)
        if self._at != len(self._data):
            raise self._fault(f"{len(self._data) - self._at} bytes follow behind the last variable")
        return Ct2File(self._path, version, spec, revision, variables, self._data)

    def _variable(self, version: int) -> tuple[str, Variable]:
        name = self._string("the name of a variable")
        rank = self._number("<B", f"the rank of {name!r}")
        if rank > _MAX_RANK:
            raise self._fault(f"{name!r} has rank {rank}, more than {_MAX_RANK}")
        shape = tuple(self._number("<I", f"the shape of {name!r}") for _ in range(rank))
        kind = self._number("<B", f"the type of {name!r}")
        if version < 4:
            if kind not in _BY_SIZE:
                raise self._fault(f"{name!r} has items of {kind} bytes; known are {', '.join(map(str, _BY_SIZE))}")
            dtype, width = _BY_SIZE[kind], kind
            size = self._number("<I", f"the items of {name!r}") * width
        else:
            if kind not in _DTYPES:
                raise self._fault(f"{name!r} has the type {kind}; known are 0 to {max(_DTYPES)}")
            dtype, width = _DTYPES[kind]
            size = self._number("<I", f"the bytes of {name!r}")
        if size != math.prod(shape) * width:
            raise self._fault(f"{name!r} of shape {shape} ({dtype}) is said to occupy {size} bytes")
        variable = Variable(dtype, shape, self._at, size)
        self._skip(size, f"the data of {name!r}")
        return name, variable

    def _aliases(self, variables: dict[str, Variable]) -> None:
        for _ in range(self._number("<I", "the number of aliases")):
            alias, target = self._string("an alias"), self._string("the target of an alias")
            if target not in variables:
                raise self._fault(f"{alias!r} stands for {target!r}, which the file does not have")
            variables[alias] = variables[target]
            if f"{target}_scale" in variables:
                variables[f"{alias}_scale"] = variables[f"{target}_scale"]

    def _string(self, what: str) -> str:
        length = self._number("<H", f"the length of {what}")
        start = self._at
        if not 0 < length <= _MAX_NAME:
            raise self._fault(f"{what} has {length} bytes, expected 1 to {_MAX_NAME}")
        self._skip(length, what)
        raw = self._data[start : self._at]
        try:
            if raw[-1] != 0:
                raise ValueError("it does not end with a zero byte")
            return raw[:-1].decode("utf-8")
        except ValueError as error:
            self._at = start
            raise self._fault(f"{what} is not text: {error}") from error

    def _number(self, code: str, what: str) -> int:
        start = self._at
        self._skip(struct.calcsize(code), what)
        return int(struct.unpack_from(code, self._data, start)[0])

    def _skip(self, size: int, what: str) -> None:
        if self._at + size > len(self._data):
            raise self._fault(f"{what} needs {size} bytes and the file ends at {len(self._data)}: it is truncated")
        self._at += size

    def _fault(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged or no CTranslate2 model, at byte {self._at}: {reason}. Fetch it again."
        )
