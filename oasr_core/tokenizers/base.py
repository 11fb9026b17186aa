"""The contract of the ``oasr.tokenizers`` axis: ids to text, incrementally and whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import TokenizerSpec


class IncrementalDecoder(ABC):
    """Grows a text token by token.

    The concatenation of what :meth:`push` and :meth:`flush` return equals :meth:`Tokenizer.decode` of all tokens, and
    no returned string ever ends inside a character.
    """

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Append ids; return the text that they make certain."""

    @abstractmethod
    def flush(self) -> str:
        """Return what was held back (incomplete bytes become U+FFFD once)."""


class Tokenizer(ABC):
    """Maps between unit ids and text."""

    #: True where :meth:`encode` works.
    supports_encode: bool = False

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: TokenizerSpec) -> Tokenizer:
        """Build from what the converter found; raises ``CheckpointError`` naming the file and line at fault."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids that :meth:`decode` strips (blank, sos, eos, padding)."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special ids are stripped."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; ``RequestRefusedError`` where a symbol cannot be encoded or encoding is not offered."""
        from oasr_core.errors import RequestRefusedError

        raise RequestRefusedError(f"{type(self).__name__} cannot encode text: the checkpoint ships no encoder model.")

    @abstractmethod
    def token_pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per id whose concatenation equals :meth:`decode` (special ids give ``""``)."""

    @abstractmethod
    def incremental(self) -> IncrementalDecoder:
        """A fresh incremental decoder."""
