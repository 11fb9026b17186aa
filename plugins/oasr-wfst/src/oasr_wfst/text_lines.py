"""Lines and fields of text files, compressed or not."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from oasr_wfst.errors import GraphError

_GZIP = b"\x1f\x8b"


def numbered_fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """``(line number from 1, fields)`` of each line that is not blank; gzip is read through.

    Fields are separated by spaces and tabs alone: other white space, such as U+3000, may be a token. Raises
    ``GraphError`` naming file and line where the file cannot be read or is not UTF-8.
    """
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                fields = [field for field in line.rstrip("\r\n").replace("\t", " ").split(" ") if field]
                if fields:
                    yield number, fields
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}, after line {number}: not UTF-8 text ({error.reason}).", number + 1) from error
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise GraphError(f"{path} cannot be read: {reason}") from error


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    return gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8")
