"""Log records on the command line: one line each on standard error, with the traceback only where it is asked for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from oasr_core.errors import ConfigError
from oasr_core.registry import AXES, registry

ENV_DEBUG: Final = "OASR_DEBUG"
ENV_LOG: Final = "OASR_LOG"

#: What the line of an unexpected error ends with.
TRACEBACK_HINT: Final = f"(run with {ENV_DEBUG}=1 for the traceback)"

_LEVELS: Final = ("debug", "info", "warning", "error")
# Failures of requests come with their outputs, which the commands print.
_FAILURES: Final = "oasr_core.executors.failures"


def debug_wanted() -> bool:
    """Whether tracebacks are shown: ``OASR_DEBUG``, which ``oasr --debug`` sets too."""
    return os.environ.get(ENV_DEBUG, "") not in ("", "0")


class LineFormatter(logging.Formatter):
    """``warning: message`` or ``error: message: Kind: cause``, on one line; the traceback follows under debug."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        kind = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        message = record.getMessage()
        raised = record.exc_info[1] if record.exc_info else None
        if raised is not None and not debug_wanted():
            message = f"{message}: {type(raised).__name__}: {raised} {TRACEBACK_HINT}"
        line = f"{kind}: {' '.join(part.strip() for part in message.splitlines())}"
        if record.exc_info and debug_wanted():
            line += "\n" + self.formatException(record.exc_info)
        return line


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class LineHandler(logging.Handler):
    """Writes to what standard error is at the time of the record, or through :attr:`write`."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], None] = _write

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if record.name == _FAILURES and not debug_wanted():
            return
        try:
            self.write(self.format(record))
        except Exception:  # logging must not end the program; handleError tells it where logging.raiseExceptions is set
            self.handleError(record)


@contextmanager
def log_lines() -> Iterator[None]:
    """Show log records as lines meanwhile: warnings of everybody, of OASR and its plugins what ``OASR_LOG`` says.

    Raises ``ConfigError`` for a level that does not exist.
    """
    level = os.environ.get(ENV_LOG, "").lower()
    if level and level not in _LEVELS:
        raise ConfigError(f"{ENV_LOG}={level!r} is no level; allowed: {', '.join(_LEVELS)}")
    handler = LineHandler()
    handler.setFormatter(LineFormatter())
    loggers = {logging.getLogger(name) for name in _packages()} if level else set()
    before = {logger: logger.level for logger in loggers}
    logging.getLogger().addHandler(handler)
    for logger in loggers:
        logger.setLevel(level.upper())
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for logger, usual in before.items():
            logger.setLevel(usual)


@contextmanager
def lines_through(write: Callable[[str], None]) -> Iterator[None]:
    """Hand log lines to ``write`` meanwhile: to whatever draws on the terminal that they would be written to."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]
    for handler in handlers:
        handler.write = write
    try:
        yield
    finally:
        for handler in handlers:
            handler.write = _write


def _packages() -> set[str]:
    """Top-level packages of the core and of the installed plugins."""
    values = (entry.value for axis in AXES for entry in registry(axis).entries())
    return {"oasr_core", *(value.partition(":")[0].partition(".")[0] for value in values if ":" in value)}
