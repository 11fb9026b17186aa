"""One rule from ids to text for all three views: whole, by piece, and incremental."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer

#: Tokens that stand for no text, whatever their id; a table's own list replaces them.
SPECIAL_TOKENS = frozenset(
    {"<blank>", "<blk>", "<eps>", "<pad>", "<s>", "</s>", "<sos>", "<eos>", "<sos/eos>", "<bos>", "<|endoftext|>"}
)


class Detokenizer(Protocol):
    """The state between two tokens of one text."""

    def step(self, token: int) -> str:
        """The text that ``token`` makes certain."""
        ...

    def finish(self) -> str:
        """The text that is left when no token follows."""
        ...


class SteppedTokenizer(Tokenizer):
    """A tokenizer that is defined by its :class:`Detokenizer`, so that its three views cannot differ."""

    @abstractmethod
    def detokenizer(self) -> Detokenizer:
        """A fresh state; its ``step`` gives ``""`` for special ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special ids are stripped."""
        return "".join(self.token_pieces(ids))

    def token_pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per id whose concatenation equals :meth:`decode`; what is held back joins a later id's string."""
        state = self.detokenizer()
        pieces = [state.step(token) for token in ids]
        rest = state.finish()
        if rest:
            pieces[-1] += rest
        return pieces

    def incremental(self) -> IncrementalDecoder:
        """A fresh incremental decoder."""
        return _SteppedDecoder(self.detokenizer())


class _SteppedDecoder(IncrementalDecoder):
    def __init__(self, state: Detokenizer) -> None:
        self._state = state

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._state.step(token) for token in ids])

    def flush(self) -> str:
        return self._state.finish()
