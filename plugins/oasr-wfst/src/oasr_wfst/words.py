"""The words of a graph as a vocabulary of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.errors import ConfigError
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer

#: Symbols that stand for no word: epsilon, sentence boundaries, disambiguation symbols.
_UNSPOKEN = re.compile(r"<eps>|<s>|</s>|#\d+")


class WordTable(Tokenizer):
    """Ids are those of the graph's words; text is the words with ``separator`` between them."""

    def __init__(self, symbols: Sequence[str], separator: str = " ") -> None:
        """``symbols[i]`` is the word with the id ``i``; ids without a word have ``""``."""
        self._symbols = symbols
        self._separator = separator

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> WordTable:
        """Not from a checkpoint: a graph brings its words with it."""
        raise ConfigError(
            "the words of a graph come with the graph, not with a checkpoint; set decode_options['words']."
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest word id."""
        return len(self._symbols)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Epsilon, sentence boundaries, disambiguation symbols and ids without a word."""
        return frozenset(i for i, symbol in enumerate(self._symbols) if not symbol or _UNSPOKEN.fullmatch(symbol))

    def decode(self, ids: Sequence[int]) -> str:
        """The words of ``ids``."""
        return "".join(self.token_pieces(ids))

    def token_pieces(self, ids: Sequence[int]) -> list[str]:
        """Every word but the first with the separator before it."""
        return self.pieces_after(ids, begun=False)

    def pieces_after(self, ids: Sequence[int], *, begun: bool) -> list[str]:
        """:meth:`token_pieces` of a text that has ``begun`` with a word already."""
        pieces = []
        for word in ids:
            symbol = "" if word in self.special_ids else self._symbols[word]
            pieces.append(self._separator + symbol if symbol and begun else symbol)
            begun = begun or bool(symbol)
        return pieces

    def incremental(self) -> IncrementalDecoder:
        """Words are whole, so nothing is ever held back."""
        return _Words(self)


class _Words(IncrementalDecoder):
    def __init__(self, table: WordTable) -> None:
        self._table = table
        self._begun = False

    def push(self, ids: Sequence[int]) -> str:
        text = "".join(self._table.pieces_after(ids, begun=self._begun))
        self._begun = self._begun or bool(text)
        return text

    def flush(self) -> str:
        return ""
