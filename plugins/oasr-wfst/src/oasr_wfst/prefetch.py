"""Asking for memory before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

_READ, _KEEP_IN_ALL_CACHES, _DATA = 0, 3, 1


def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """The type of a call, and what makes its machine code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address_type, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(base, [arguments[1]]), address_type)
        function_type = ir.FunctionType(ir.VoidType(), [address_type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address_type], function_type)
        hints = [ir.Constant(number, hint) for hint in (_READ, _KEEP_IN_ALL_CACHES, _DATA)]
        builder.call(function, [address, *hints])
        return context.get_dummy_value()

    return types.void(array, index), generate


#: Within compiled code: ``prefetch(array, index)`` begins to load ``array[index]``; ``index`` is not negative.
prefetch = cast("Callable[[object, object], None]", intrinsic(_prefetch))
