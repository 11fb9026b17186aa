"""Tokenizer kind ``sentencepiece``: a SentencePiece model whose own ids are the units, byte fallback included."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.tokenizers.detokenizer import SPECIAL_TOKENS, Detokenizer, SteppedTokenizer
from oasr_core.tokenizers.spec import parse_options, required_file

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import TokenizerSpec

_SPACE = "▁"


class SentencePieceOptions(BaseModel):
    """``TokenizerSpec.options`` of a SentencePiece model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    special_ids: tuple[int, ...] | None = Field(
        None, description="Ids that spell nothing. None: control pieces and blank, padding, sos and eos by name."
    )
    case: Literal["upper", "lower", "keep"] = Field("keep", description="Case that text takes before encoding.")


class SentencePieceTokenizer(SteppedTokenizer):
    """Decodes as SentencePiece itself does, and one id at a time.

    Files: ``model``. Byte pieces (``<0xE4>``) are collected until they form a character; bytes that never do become
    U+FFFD where the next piece (or the end) shows it. The unknown piece spells the
    model's own surface, `` ⁇ `` by default.
    """

    oasr_api: ClassVar[str] = "1.0"
    supports_encode = True

    def __init__(self, path: Path, options: SentencePieceOptions) -> None:
        self.options = options
        self._processor = load_processor(path)
        size: int = self._processor.vocab_size()
        pieces: list[str] = [self._processor.id_to_piece(index) for index in range(size)]
        special = options.special_ids
        if special is None:
            special = tuple(
                index for index in range(size) if self._processor.is_control(index) or pieces[index] in SPECIAL_TOKENS
            )
        outside = [index for index in special if not 0 <= index < size]
        if outside:
            raise CheckpointError(f"special_ids {outside} are not in {path}, whose ids are 0 to {size - 1}.")
        self._special = frozenset(special)
        #: What each id spells: bytes, or text with ``▁`` for a space; the unknown piece spells its surface.
        self._spelling: list[str | bytes] = [self._spell(index, piece) for index, piece in enumerate(pieces)]
        self._strips_first, self._strips_all = _leading_space_rule(self._processor, pieces)

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> SentencePieceTokenizer:
        """Build from the file role ``model``."""
        options = parse_options(SentencePieceOptions, spec.kind, spec.options)
        return cls(required_file(spec.kind, spec.files, "model", {"model"}), options)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._spelling)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that spell nothing."""
        return self._special

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; ``RequestRefusedError`` where a part of it is unknown to the model."""
        text = {"upper": text.upper(), "lower": text.lower(), "keep": text}[self.options.case]
        ids: list[int] = self._processor.encode(text)
        unknown: int = self._processor.unk_id()
        if unknown in ids:
            surface = self._processor.encode(text, out_type=str)[ids.index(unknown)]
            raise RequestRefusedError(f"{text!r} cannot be encoded: the model has no piece for {surface!r}.")
        return ids

    def detokenizer(self) -> Detokenizer:
        """A fresh state that holds incomplete characters back."""
        return _Speller(self.spelling, self._strips_first, self._strips_all)

    def spelling(self, token: int) -> str | bytes:
        """What ``token`` spells before spaces are settled; ``CheckpointError`` for an id that the model lacks."""
        if not 0 <= token < len(self._spelling):
            raise CheckpointError(
                f"Token id {token} is not in the SentencePiece model, whose ids are 0 to {len(self._spelling) - 1}: "
                "the model and the weights do not belong together."
            )
        return self._spelling[token]

    def _spell(self, index: int, piece: str) -> str | bytes:
        if index in self._special:
            return ""
        if self._processor.is_byte(index):
            return bytes([int(piece[3:-1], 16)])
        if self._processor.is_unknown(index):
            surface: str = self._processor.decode([index])
            return surface
        return piece


class _Speller:
    """SentencePiece's decoding rule, one piece at a time."""

    def __init__(self, spelling: Callable[[int], str | bytes], strips_first: bool, strips_all: bool) -> None:
        self._spelling = spelling
        self._strips = strips_first
        self._strips_all = strips_all
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        spelled = self._spelling(token)
        if not spelled:
            return ""
        if isinstance(spelled, bytes):
            text = self._bytes.decode(spelled)
            self._strips = self._strips and not text
            return text
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        if self._strips and not text and spelled.startswith(_SPACE):
            # A model that removes extra whitespace drops every leading space, another one the first alone.
            spelled = spelled[1:]
            self._strips = self._strips_all and not spelled
        else:
            self._strips = False
        return text + spelled.replace(_SPACE, " ")

    def finish(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text


def load_processor(path: Path) -> Any:
    """A SentencePiece processor; ``CheckpointError`` where the model cannot be read."""
    import sentencepiece

    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"SentencePiece model {path} cannot be read: {error.strerror or error}.") from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        size = processor.vocab_size()
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model or is damaged: {error}.") from error
    if not content or not size:
        raise CheckpointError(f"SentencePiece model {path} is empty.")
    return processor


def _leading_space_rule(processor: Any, pieces: list[str]) -> tuple[bool, bool]:
    """Whether a text's first leading space is dropped, and whether all are: asked of the model itself."""
    bare = next((index for index, piece in enumerate(pieces) if piece == _SPACE), None)
    word = next((index for index, piece in enumerate(pieces) if piece.startswith(_SPACE) and len(piece) > 1), bare)
    if word is None:
        return True, False
    strips_first = not processor.decode([word]).startswith(" ")
    strips_all = bare is not None and not processor.decode([bare, word]).startswith(" ")
    return strips_first, strips_first and strips_all
