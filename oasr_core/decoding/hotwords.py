"""Hotwords of an engine and of a request become a context graph; shared by every strategy that biases its search."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from oasr_core.decoding.context import ContextGraph
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions, Hotword
from oasr_core.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_KEPT_GRAPHS = 64


class HotwordOptions(Protocol):
    """The fields of a strategy's options that say how it is biased."""

    @property
    def hotwords(self) -> tuple[Hotword, ...]:
        """The engine's own phrases, in force for every request."""
        ...

    @property
    def hotword_boost(self) -> float:
        """Score per token of a phrase without a boost of its own."""
        ...

    @property
    def strict_hotwords(self) -> bool:
        """Refuse phrases that cannot be encoded, rather than report them."""
        ...


class HotwordContext(NamedTuple):
    """What the hotwords of a request come to; ``penalised`` counts the tokens that may lower a score."""

    graph: ContextGraph
    penalised: int
    unencoded: tuple[str, ...]


class HotwordEncoder:
    """Builds the context graphs of requests; the graphs of the latest lists of hotwords are kept."""

    def __init__(
        self, tokenizer: Tokenizer, options: HotwordOptions, vocab_size: int, silent: Iterable[int], *, strategy: str
    ) -> None:
        """``silent`` labels (blank and the like) are part of no phrase; ``strategy`` is named in messages.

        Raises ``ConfigError`` where the engine's own hotwords cannot be encoded and ``strict_hotwords`` is set.
        """
        self._tokenizer = tokenizer
        self._options = options
        self._vocab_size = vocab_size
        self._silent = frozenset(silent) | tokenizer.special_ids
        self._contexts: OrderedDict[tuple[Hotword, ...], HotwordContext] = OrderedDict()
        unencoded = self.context(DecodingOptions()).unencoded
        if unencoded and options.strict_hotwords:
            raise ConfigError(f"Decode option hotwords of strategy {strategy!r}: {self._complaint(unencoded)}")
        if unencoded:
            logger.warning("hotwords without effect: %s", self._complaint(unencoded))

    def context(self, options: DecodingOptions) -> HotwordContext:
        """The engine's hotwords and then the request's, so that a request has the last word on a phrase."""
        known = self._contexts.get(options.hotwords)
        if known is None:
            known = self._contexts[options.hotwords] = self._build(options.hotwords)
            if len(self._contexts) > _KEPT_GRAPHS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(options.hotwords)
        return known

    def validate(self, options: DecodingOptions) -> None:
        """Raise ``RequestRefusedError`` for phrases that cannot be encoded where ``strict_hotwords`` is set."""
        unencoded = self.context(options).unencoded if options.hotwords else ()
        if unencoded and self._options.strict_hotwords:
            raise RequestRefusedError(f"hotwords are refused: {self._complaint(unencoded)}")

    def _build(self, hotwords: tuple[Hotword, ...]) -> HotwordContext:
        phrases: list[tuple[list[int], float]] = []
        unencoded: list[str] = []
        for hotword in (*self._options.hotwords, *hotwords):
            tokens = self._encode(hotword.phrase)
            if tokens:
                boost = self._options.hotword_boost if hotword.boost is None else hotword.boost
                phrases.append((tokens, boost))
            elif hotword.phrase not in unencoded:
                unencoded.append(hotword.phrase)
        penalised = {token for tokens, boost in phrases if boost < 0 for token in tokens}
        return HotwordContext(ContextGraph(phrases), len(penalised), tuple(unencoded))

    def _encode(self, phrase: str) -> list[int]:
        """Token ids of ``phrase``; none where it cannot be encoded."""
        try:
            tokens = self._tokenizer.encode(phrase)
        except RequestRefusedError:
            return []
        return tokens if all(token < self._vocab_size and token not in self._silent for token in tokens) else []

    def _complaint(self, unencoded: tuple[str, ...]) -> str:
        advice = (
            "the model has no units for them; write them as the model's transcripts are written"
            if self._tokenizer.supports_encode
            else f"{type(self._tokenizer).__name__} cannot encode text; a checkpoint with its encoder model can"
        )
        return f"{', '.join(map(repr, unencoded))} cannot be encoded: {advice}."
