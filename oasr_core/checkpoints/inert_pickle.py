"""Reads the structure of a torch pickle without executing anything and without torch.

A pickle is a program for a stack machine. The machine here knows the instructions that build plain containers; a
reference to a global stays a :class:`Symbol`, a call stays :class:`Opaque` unless it is one of torch's tensor rebuild
calls, which become a :class:`TensorInfo`. No name is ever imported, so an unknown or hostile global is harmless.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype (torch's name, ``"float32"``) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Symbol:
    """A global that the pickle refers to."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False)
class Opaque:
    """The result of a call that this reader does not understand."""

    origin: str


@dataclass(frozen=True, eq=False)
class _Storage:
    dtype: str


_STORAGE_DTYPES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": "uint8",
}

_MARK: Final = object()


def read_structure(data: bytes) -> object:
    """What ``data`` describes, with :class:`TensorInfo` in place of tensors; ``ValueError`` where malformed."""
    try:
        return _Machine().run(data)
    except ValueError:
        raise
    # The instructions come from an untrusted file: whatever they break is a malformed pickle.
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, UnicodeError) as error:
        raise ValueError(f"malformed pickle: {type(error).__name__}: {error}") from error


class _Machine:
    """The stack machine; one instance reads one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of strings with escapes that Python would not write
            return self._run(data)

    def _run(self, data: bytes) -> object:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _HANDLERS:
                _HANDLERS[name](self, argument)
            elif name not in _IGNORED:
                raise ValueError(f"malformed pickle: instruction {name} does not occur in checkpoints")
        raise ValueError("malformed pickle: it has no end")

    def pop_to_mark(self) -> list[Any]:
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("malformed pickle: a group has no beginning")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("malformed pickle: the stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Symbol(str(module), str(name)))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(zip(items[0::2], items[1::2], strict=True))

    def append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(items)

    def persistent(self) -> None:
        reference = self.stack.pop()
        kind = reference[1]
        known = isinstance(kind, Symbol) and kind.module in ("torch", "torch.storage", "torch.cuda")
        self.stack.append(_Storage(_STORAGE_DTYPES.get(kind.name, kind.name)) if known else Opaque(str(kind)))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_call(function, arguments))

    def new_object(self, count: int) -> None:
        del self.stack[-count + 1 :]
        self.stack.append(Opaque(str(self.stack.pop())))

    def dict_from_mark(self) -> None:
        items = self.pop_to_mark()
        self.stack.append(dict(zip(items[0::2], items[1::2], strict=True)))


def _call(function: object, arguments: Any) -> object:
    """What a call yields: a container, a tensor's description, or :class:`Opaque`."""
    if not isinstance(function, Symbol) or not isinstance(arguments, tuple):
        return Opaque(str(function))
    # A tensor of a subclass is stored as the plain call that builds its data, wrapped.
    while str(function) == "torch._tensor._rebuild_from_type_v2":
        function, arguments = arguments[0], arguments[2]
        if not isinstance(function, Symbol):
            return Opaque(str(function))
    known = _CALLS.get((function.module, function.name))
    return known(arguments) if known else Opaque(str(function))


def _strided(arguments: tuple[Any, ...]) -> TensorInfo:
    storage = arguments[0]
    if not isinstance(storage, _Storage):
        raise ValueError("malformed pickle: a tensor without a storage")
    return TensorInfo(_shape(arguments[2]), storage.dtype)


def _strided_with_dtype(arguments: tuple[Any, ...]) -> TensorInfo:
    return TensorInfo(_shape(arguments[2]), _dtype(arguments[6]))


def _meta(arguments: tuple[Any, ...]) -> TensorInfo:
    return TensorInfo(_shape(arguments[1]), _dtype(arguments[0]))


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("malformed pickle: a tensor's shape is not a tuple of sizes")
    return value


def _dtype(value: object) -> str:
    return value.name if isinstance(value, Symbol) else str(value)


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(arguments[0]) if arguments else {}


_CALLS: Final[Mapping[tuple[str, str], Callable[[tuple[Any, ...]], object]]] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): lambda _: {},
    ("torch", "Size"): lambda arguments: tuple(arguments[0]),
    ("torch._utils", "_rebuild_tensor"): _strided,
    ("torch._utils", "_rebuild_tensor_v2"): _strided,
    ("torch._utils", "_rebuild_tensor_v3"): _strided_with_dtype,
    ("torch._utils", "_rebuild_qtensor"): _strided,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta,
    ("torch._utils", "_rebuild_parameter"): lambda arguments: arguments[0],
    ("torch._utils", "_rebuild_parameter_with_state"): lambda arguments: arguments[0],
}

#: Instructions that push their own argument.
_LITERALS: Final = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_CONSTANTS: Final[Mapping[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_IGNORED: Final = frozenset({"PROTO", "FRAME"})
_HANDLERS: Final[Mapping[str, Callable[[_Machine, Any], object]]] = {
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "DICT": lambda m, _: m.dict_from_mark(),
    "FROZENSET": lambda m, _: m.stack.append(frozenset(m.pop_to_mark())),
    "SETITEM": lambda m, _: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "APPEND": lambda m, _: m.append_items([m.stack.pop()]),
    "APPENDS": lambda m, _: m.append_items(m.pop_to_mark()),
    "ADDITEMS": lambda m, _: m.append_items(m.pop_to_mark()),
    "GLOBAL": lambda m, argument: m.stack.append(Symbol(*argument.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.stack_global(),
    "REDUCE": lambda m, _: m.reduce(),
    "NEWOBJ": lambda m, _: m.new_object(2),
    "NEWOBJ_EX": lambda m, _: m.new_object(3),
    "BUILD": lambda m, _: m.stack.pop(),
    "BINPERSID": lambda m, _: m.persistent(),
    "PUT": lambda m, argument: m.put(argument),
    "BINPUT": lambda m, argument: m.put(argument),
    "LONG_BINPUT": lambda m, argument: m.put(argument),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GET": lambda m, argument: m.get(argument),
    "BINGET": lambda m, argument: m.get(argument),
    "LONG_BINGET": lambda m, argument: m.get(argument),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
}
