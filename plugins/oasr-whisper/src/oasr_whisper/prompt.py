"""What Whisper's decoder is given before it generates: earlier text, then who speaks and what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.tokenizers.base import Tokenizer
from oasr_whisper.config import WhisperTokens
from oasr_whisper.rules import TIMESTAMPS

_TASKS = ("transcribe", "translate")


class Prompt(NamedTuple):
    """Token ids, and the index of ``<|startoftranscript|>`` among them."""

    tokens: list[int]
    sot: int


class PromptBuilder:
    """Makes prompts of requests.

    ``<|startofprev|>``, the hotwords, the prompt's text and the context's tokens come first, where there are any: as
    many tokens as half of the decoder's positions hold, the latest of those behind the hotwords. Then
    ``<|startoftranscript|>``, on a multilingual model the language and the task, and without timestamps
    ``<|notimestamps|>``.
    """

    def __init__(self, tokens: WhisperTokens, tokenizer: Tokenizer, max_positions: int) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._max_context = max_positions // 2 - 1

    def build(self, options: DecodingOptions, language: str, *, timestamps: bool) -> Prompt:
        """The prompt of a request in a ``language`` of the checkpoint."""
        context = self.context(options)
        head = [self._tokens.sot_prev, *context] if context else []
        start = self.start(language, options.task)
        return Prompt([*head, *start] if timestamps else [*head, *start, self._tokens.no_timestamps], len(head))

    def start(self, language: str, task: str | None) -> list[int]:
        """``<|startoftranscript|>`` and what follows it on this checkpoint."""
        ids = self._tokens
        if not ids.multilingual:
            return [ids.sot]
        return [ids.sot, ids.language_ids[language], ids.translate if task == "translate" else ids.transcribe]

    def context(self, options: DecodingOptions) -> list[int]:
        """Tokens behind ``<|startofprev|>``; ``RequestRefusedError`` where a text cannot be encoded."""
        hotwords = self._encode(", ".join(hotword.phrase.strip() for hotword in options.hotwords))[: self._max_context]
        earlier = [*self._encode(options.prompt or ""), *options.context_tokens]
        room = self._max_context - len(hotwords)
        return [*hotwords, *earlier[max(len(earlier) - room, 0) :]]

    def ceiling(self, options: DecodingOptions) -> int:
        """Tokens that the prompt of such a request has at most."""
        context = self.context(options)
        return len(context) + bool(context) + (3 if self._tokens.multilingual else 1) + 1

    def validate(self, options: DecodingOptions) -> None:
        """Raise ``RequestRefusedError`` for what this checkpoint cannot be asked."""
        self._check_language(options.language)
        if options.task is not None and options.task not in _TASKS:
            raise RequestRefusedError(f"task={options.task!r} is not known; tasks are {' and '.join(_TASKS)}.")
        if options.task == "translate" and not self._tokens.multilingual:
            raise RequestRefusedError("task='translate' needs a multilingual checkpoint; this one knows English alone.")
        boosted = [hotword.phrase for hotword in options.hotwords if hotword.boost is not None]
        if boosted:
            raise RequestRefusedError(
                f"hotwords {boosted} have a boost, and this model takes hotwords as a prompt, without weights; leave "
                "their boost out."
            )
        control = [token for token in options.context_tokens if not self._says_something(token)]
        if control:
            raise RequestRefusedError(
                f"context_tokens {control} are no text and no timestamps of this checkpoint; leave control tokens out."
            )
        self.context(options)

    def _says_something(self, token: int) -> bool:
        begin = self._tokens.timestamp_begin
        return token < self._tokens.eot or begin <= token < begin + TIMESTAMPS

    def _check_language(self, language: str | None) -> None:
        if language is None:
            return
        known: Sequence[str] = sorted(self._tokens.language_ids) if self._tokens.multilingual else ("en",)
        if language not in known:
            raise RequestRefusedError(f"language={language!r} is not one of this checkpoint's: {', '.join(known)}.")

    def _encode(self, text: str) -> list[int]:
        """Ids of a text as a continuation; none of an empty one."""
        text = text.strip()
        return self._tokenizer.encode(f" {text}") if text else []
