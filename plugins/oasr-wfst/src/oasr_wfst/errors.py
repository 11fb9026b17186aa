"""The error of this package."""

from __future__ import annotations

from oasr_core.errors import CheckpointError


class GraphError(CheckpointError):
    """A decoding graph, or a file that one is read or built from, is damaged, foreign or inconsistent.

    ``offset`` says where: the byte of a binary file, the line of a text file (from 1), or the index inside of the
    array ``array``; ``None`` where no single place is at fault.
    """

    def __init__(self, message: str, offset: int | None = None, array: str | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.array = array
