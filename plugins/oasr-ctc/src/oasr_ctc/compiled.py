"""Machine code from Python functions: how kernels are compiled and cached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numba

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` at its first call and keep the machine code on disk for the next process.

    The cache lies in ``NUMBA_CACHE_DIR``, else beside the module, else in the user's cache directory, wherever numba
    may write; where it may write nowhere, every process compiles anew, and that is logged.
    """
    try:
        return cast("_Function", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError as error:
        logger.warning("%s is compiled anew in every process: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        return cast("_Function", numba.njit(nogil=True)(function))
