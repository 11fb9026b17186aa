"""Machine code from Python functions: how plugins' kernels are compiled and cached.

Needs numba, which the core itself does not: a plugin that imports this module depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
from numba.core import event

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` at its first call and keep the machine code on disk for the next process.

    It runs without the interpreter lock, so that threads search side by side. The cache lies in ``NUMBA_CACHE_DIR``,
    else beside the module, else in the user's cache directory; where numba may write nowhere, every process compiles
    anew, and that is logged.
    """
    try:
        return cast("_Function", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError as error:
        logger.warning("%s is compiled anew in every process: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        return cast("_Function", numba.njit(nogil=True)(function))


class _Notice(event.Listener):
    """Says at the first function that is compiled, which one from the cache is not, that this takes its time."""

    def __init__(self, what: str, seconds: int) -> None:
        self._what, self._seconds = what, seconds
        self._said = False

    def on_start(self, started: Any) -> None:
        """A function is about to be compiled."""
        if not self._said:
            self._said = True
            logger.warning("compiling %s (once on this machine, about %d s)", self._what, self._seconds)

    def on_end(self, ended: Any) -> None:
        """A function has been compiled."""


@contextmanager
def compilation_announced(what: str, seconds: int) -> Iterator[None]:
    """Log one line where anything is compiled meanwhile: ``what``, which commonly takes ``seconds``."""
    with event.install_listener("numba:compile", _Notice(what, seconds)):
        yield
