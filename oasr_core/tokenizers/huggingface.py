"""Tokenizer kind ``huggingface``: a ``tokenizer.json`` of the ``tokenizers`` library (extra ``huggingface``)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.errors import CheckpointError
from oasr_core.tokenizers.byte_level import ByteDetokenizer
from oasr_core.tokenizers.detokenizer import Detokenizer, SteppedTokenizer
from oasr_core.tokenizers.spec import parse_options, required_file
from oasr_core.tokenizers.tokenizer_json import Vocabulary, checked_size

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import TokenizerSpec

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HuggingFaceOptions(BaseModel):
    """``TokenizerSpec.options`` of a ``tokenizer.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(
        None, gt=0, description="Ids of the weights; those that the tokenizer lacks spell nothing. None: its own."
    )


class HuggingFaceTokenizer(SteppedTokenizer):
    """Decodes as ``tokenizers`` does with special tokens skipped, and one id at a time.

    Files: ``tokenizer`` (``tokenizer.json``) and optionally ``config`` (``tokenizer_config.json``, for the added tokens
    that only it names). Special are the added tokens flagged so; text never encodes to them, even where it spells one.
    Byte-level vocabularies (GPT-2, Qwen) are decoded from their bytes; with any other decoder (SentencePiece's ``▁``,
    byte fallback, word pieces) a token's text is what the library's text of the last tokens grows by.
    """

    oasr_api: ClassVar[str] = "1.0"
    supports_encode = True

    def __init__(self, vocabulary: Vocabulary, options: HuggingFaceOptions) -> None:
        self.options = options
        self._vocabulary = vocabulary
        self._size = checked_size(vocabulary.path, len(vocabulary.tokens), options.vocab_size)
        absent = [index for index, token in enumerate(vocabulary.tokens) if token is None]
        self._special = vocabulary.special | frozenset(absent) | frozenset(range(len(vocabulary.tokens), self._size))

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> HuggingFaceTokenizer:
        """Build from the file roles ``tokenizer`` and ``config``; :class:`MissingExtraError` without the library."""
        options = parse_options(HuggingFaceOptions, spec.kind, spec.options)
        path = required_file(spec.kind, spec.files, "tokenizer", {"tokenizer", "config"})
        return cls(Vocabulary.read(path, spec.files.get("config")), options)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that spell nothing: special added tokens, and ids without a token."""
        return self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own spelling (``<|im_start|>``), or ``None``: how prompts get their special ids."""
        return self._vocabulary.ids.get(token)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without special tokens; ``RequestRefusedError`` where a part of it cannot be spelled."""
        return self._vocabulary.encode(text)

    def detokenizer(self) -> Detokenizer:
        """A fresh state that holds incomplete characters back."""
        if self._vocabulary.is_byte_level:
            return ByteDetokenizer(self._bytes_of)
        return _GrowingText(self)

    @cached_property
    def fallback_bytes(self) -> Mapping[int, bytes]:
        """The tokens that stand for one byte (``<0xE4>``), where the decoder falls back to bytes."""
        if "ByteFallback" not in self._vocabulary.decoders:
            return {}
        matches = {token: _BYTE_TOKEN.fullmatch(token) for token in self._vocabulary.ids}
        return {
            self._vocabulary.ids[token]: bytes.fromhex(match[1])
            for token, match in matches.items()
            if match and self._vocabulary.ids[token] not in self._vocabulary.added
        }

    def check_id(self, token: int) -> None:
        """``CheckpointError`` for an id that the weights should not give."""
        if not 0 <= token < self._size:
            raise CheckpointError(
                f"Token id {token} is not in {self._vocabulary.path}, whose ids are 0 to {self._size - 1}: "
                "the tokenizer and the weights do not belong together."
            )

    def library_text(self, ids: Sequence[int]) -> str:
        """The library's own text of ordinary ``ids``."""
        text: str = self._vocabulary.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _bytes_of(self, token: int) -> bytes:
        self.check_id(token)
        return self._spelling[token]

    @cached_property
    def _spelling(self) -> list[bytes]:
        spelled = self._vocabulary.spelling()
        spelled += [b""] * (self._size - len(spelled))
        for index in self._special:
            spelled[index] = b""
        return spelled


class _GrowingText:
    """What the library's text grows by with each token, seen through a window of the last tokens that gave text.

    A token's text may depend on whether another one stands before it (the first loses its space), so the text of the
    last tokens is compared with and without the new one. Byte tokens (``<0xE4>``) are collected here until they form a
    character, because the library's text of them changes as they come.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        self._tokenizer.check_id(token)
        if token in self._tokenizer.special_ids:
            return ""
        byte = self._tokenizer.fallback_bytes.get(token)
        if byte is not None:
            text = self._take() + self._bytes.decode(byte)
            self._context = [token]
            return text
        text = self._broken_bytes()
        self._pending.append(token)
        grown = self._growth()
        if grown and not grown.endswith(_REPLACEMENT):
            text += grown
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        return self._broken_bytes() + self._take()

    def _growth(self) -> str:
        before = self._tokenizer.library_text(self._context) if self._context else ""
        return self._tokenizer.library_text(self._context + self._pending)[len(before) :]

    def _take(self) -> str:
        """The text of the tokens that wait, which become the context of the next."""
        if not self._pending:
            return ""
        grown = self._growth()
        self._context, self._pending = self._pending, []
        return grown

    def _broken_bytes(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text
