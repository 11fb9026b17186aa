"""k2's ``HLG.pt``: a dict of tensors, read without k2, without torch and without running anything of the file."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from oasr_wfst.errors import GraphError
from oasr_wfst.graph import Graph, sorted_graph

_STORAGES: Final = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_RAGGED: Final = {("_k2.ragged", "RaggedTensor"), ("_k2", "RaggedTensor"), ("_k2", "RaggedInt")}
#: Tensors lie outside of the pickle, which has a few hundred bytes.
_LARGEST_PICKLE: Final = 1 << 20
_FSA_VEC: Final = "one-dimensional, a vector of graphs (FsaVec); save the single graph, HLG[0].as_dict()"


class _Inert:
    """What a global of the pickle becomes: a name, and a call that builds arrays and dicts of data alone."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "OrderedDict":
            return dict(*arguments)
        if self.name == "_rebuild_tensor_v2":
            return _strided(*arguments[:4])
        raise pickle.UnpicklingError(f"a call of {self.name}")


class _TensorReader(pickle.Unpickler):
    """Finds no global but those of tensors and k2's ragged class, and gives inert stand-ins for these."""

    def __init__(self, archive: _Archive, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._archive = archive
        # A class of its own for each file: what a hostile pickle sets on it ends with it.
        self.ragged = type("Ragged", (_Ragged,), {"__slots__": ()})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RAGGED:
            return self.ragged
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")):
            return _Inert(name)
        if module == "torch" and name in _STORAGES:
            return _Inert(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not a tensor; nothing else is loaded")

    def persistent_load(self, reference: Any) -> npt.NDArray[Any]:
        kind, storage, key = reference[0], reference[1], reference[2]
        if kind != "storage" or not isinstance(storage, _Inert) or storage.name not in _STORAGES:
            raise pickle.UnpicklingError("a reference that is not a tensor's storage")
        return self._archive.storage(str(key), _STORAGES[storage.name])


class _Ragged:
    """k2's ragged tensor of two axes: ``row_splits`` and ``values``."""

    __slots__ = ("row_splits", "values")
    expected: ClassVar[str] = "(row_splits, 'row_ids1', values)"

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 3 or state[1] != "row_ids1":
            raise pickle.UnpicklingError(f"a ragged tensor that is not {self.expected}, that is, not of two axes")
        self.row_splits, self.values = state[0], state[2]


class _Archive:
    """A file of ``torch.save``: a zip whose entries are stored as they are, so that tensors are mapped in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise GraphError(f"{path} is not a file of torch.save, or is incomplete: {error}") from error
        pickles = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise GraphError(f"{path} is a zip archive without a data.pkl, not a file of torch.save.")
        self._prefix = pickles[0].removesuffix("data.pkl")

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def load(self) -> Any:
        """The object of the file."""
        name = self._prefix + "data.pkl"
        if self._zip.getinfo(name).file_size > _LARGEST_PICKLE:
            raise GraphError(f"{self.path}: {name} is larger than {_LARGEST_PICKLE} bytes, not a graph's.")
        try:
            return _TensorReader(self, self._zip.read(name)).load()
        except GraphError:
            raise
        except Exception as error:  # the file is untrusted: whatever reading it raises is its fault
            raise GraphError(f"{self.path} cannot be loaded as a graph: {error}") from error

    def storage(self, key: str, dtype: str) -> npt.NDArray[Any]:
        """The elements of one storage, mapped from the file."""
        try:
            info = self._zip.getinfo(f"{self._prefix}data/{key}")
        except KeyError:
            raise GraphError(f"{self.path} has no storage {key}, it is incomplete.") from None
        size, offset = info.file_size // np.dtype(dtype).itemsize, self._data_offset(info)
        if info.compress_type != zipfile.ZIP_STORED or offset + info.file_size > self.path.stat().st_size:
            raise GraphError(f"{self.path}, byte {offset}: storage {key} is compressed or cut short.", offset)
        if size == 0:
            return np.empty(0, dtype=dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(size,))

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        # The directory at the end of a zip does not say how long the header before the data is.
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise GraphError(f"{self.path}, byte {info.header_offset}: no zip entry.", info.header_offset)
        name_size, extra_size = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + int(name_size) + int(extra_size)


def read_k2(path: str | Path, *, symbols: Sequence[str] = (), tokens: Sequence[str] = (), note: str = "") -> Graph:
    """The graph of a file ``torch.save(HLG.as_dict(), path)``: ``arcs`` and ``aux_labels``, other keys are ignored.

    ``arcs`` is int32 ``(num_arcs, 4)``: source, destination, label, bits of the float score; label 0 is blank, -1 marks
    the arcs into the last state. ``aux_labels`` are word ids, int32 ``(num_arcs,)`` or a ragged tensor; 0 and -1 are no
    words. Raises ``GraphError`` for anything else, and for a file that asks for more than tensors.
    """
    path = Path(path)
    with _Archive(path) as archive:
        content = archive.load()
    if not isinstance(content, dict) or not {"arcs", "aux_labels"} <= content.keys():
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise GraphError(f"{path} has no 'arcs' and 'aux_labels' (found: {found}), so it is no decoding graph of k2.")
    arcs = content["arcs"]
    if not isinstance(arcs, np.ndarray) or arcs.dtype != np.int32 or arcs.ndim != 2 or arcs.shape[1] != 4:
        shape = getattr(arcs, "shape", ())
        what = _FSA_VEC if len(shape) == 1 else f"{getattr(arcs, 'dtype', type(arcs).__name__)} {tuple(shape)}"
        raise GraphError(f"{path}: 'arcs' is {what}; expected int32 (num_arcs, 4).")
    below = np.flatnonzero(arcs[:, 2] < -1)
    if len(below):
        arc = int(below[0])
        raise GraphError(f"{path}: arc {arc} has the label {arcs[arc, 2]}; labels are columns or -1.", arc, "label")
    num_states = int(arcs[:, :2].max(initial=0)) + 1
    if num_states > 10 * len(arcs) + 1000:
        raise GraphError(f"{path}: state {num_states - 1} occurs, but there are only {len(arcs)} arcs.")
    scores = np.ascontiguousarray(arcs[:, 3]).view(np.float32)
    strange = np.flatnonzero(~np.isfinite(scores))
    if len(strange):
        arc = int(strange[0])
        raise GraphError(f"{path}: arc {arc} has the score {scores[arc]}; scores are finite.", arc, "score")
    word_counts, words = _words(path, content["aux_labels"], len(arcs))
    try:
        return sorted_graph(
            arcs[:, 0].astype(np.int64),
            np.ascontiguousarray(arcs[:, 1]),
            np.ascontiguousarray(arcs[:, 2]),
            # 0 + score, so that k2's negative zeros become plain ones.
            np.float32(0) + scores,
            word_counts,
            words,
            num_states,
            symbols=symbols,
            tokens=tokens,
            note=note,
        )
    except GraphError as error:
        raise GraphError(f"{path}: {error}", error.offset, error.array) from error


def _words(path: Path, labels: object, num_arcs: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Words of each arc: how many, and all of them in order."""
    if isinstance(labels, _Ragged):
        splits: object = getattr(labels, "row_splits", None)
        values: object = getattr(labels, "values", None)
    elif isinstance(labels, np.ndarray):
        splits, values = np.arange(num_arcs + 1), labels
    else:
        raise GraphError(f"{path}: 'aux_labels' is {type(labels).__name__}, expected a tensor or a ragged tensor.")
    if not (_is_integers(splits) and _is_integers(values)):
        raise GraphError(f"{path}: 'aux_labels' is not made of one-dimensional tensors of whole numbers.")
    if len(splits) != num_arcs + 1 or splits[0] != 0 or splits[-1] != len(values) or np.any(np.diff(splits) < 0):
        raise GraphError(f"{path}: 'aux_labels' does not have one entry for each of the {num_arcs} arcs.")
    is_word = (values != 0) & (values != -1)
    before = np.concatenate([[0], np.cumsum(is_word)])
    return np.diff(before[splits]).astype(np.int64), values[is_word].astype(np.int32)


def _is_integers(array: object) -> TypeGuard[npt.NDArray[np.int64]]:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "i"


def _strided(storage: object, offset: Any, size: Any, stride: Any) -> npt.NDArray[Any]:
    """A tensor as torch describes it: a view of its storage, which must hold all of it."""
    if not isinstance(storage, np.ndarray) or len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        raise pickle.UnpicklingError("a tensor without a storage or with negative sizes")
    if 0 in size:
        return np.empty(tuple(size), dtype=storage.dtype)
    end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
    if end > len(storage):
        raise pickle.UnpicklingError(f"a tensor of {end} elements in a storage of {len(storage)}")
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=tuple(size), strides=strides, writeable=False)
