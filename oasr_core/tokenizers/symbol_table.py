"""Tokenizer kind ``symbol_table``: a text file with a unit and its id per line (``units.txt``, ``tokens.txt``)."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.tokenizers.detokenizer import SPECIAL_TOKENS, Detokenizer, SteppedTokenizer
from oasr_core.tokenizers.sentencepiece import load_processor
from oasr_core.tokenizers.spec import parse_options, required_file

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import TokenizerSpec

#: CJK unified ideographs, which WeNet keeps apart from SentencePiece.
_IDEOGRAPH = re.compile(r"([\u4e00-\u9fff])")
#: ``<unk>``, ``[NOISE]``, ``#0``: symbols that spell no text.
_NON_SPEECH = re.compile(r"<.*>|\[.*\]|#\d+")


class SymbolTableOptions(BaseModel):
    """``TokenizerSpec.options`` of a symbol table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    special_ids: tuple[int, ...] | None = Field(
        None, description="Ids that spell nothing. None: 0 (the CTC blank) and blank, padding, sos and eos by name."
    )
    word_separator: str = Field("▁", min_length=1, description="Symbol that stands for a space.")
    connect_symbol: str = Field("", description="Put between units ('' joins them).")
    case: Literal["upper", "lower", "keep"] | None = Field(
        None, description="Case that text takes before encoding. None: upper with a SentencePiece model, else keep."
    )


class SymbolTableTokenizer(SteppedTokenizer):
    """Joins units, turns the word separator into a space and strips the text at both ends.

    Files: ``symbols`` (the table), and optionally ``sentencepiece`` (the model that cut the training text into units).
    ``<unk>`` stays visible. Encoding is offered with a SentencePiece model, or where every unit is a single character.
    Source: the rules of WeNet's ``tokenizer/char_tokenizer.py`` and ``tokenizer/bpe_tokenizer.py``.
    """

    oasr_api: ClassVar[str] = "1.0"

    def __init__(self, symbols: list[str], options: SymbolTableOptions, sentencepiece: Path | None = None) -> None:
        self.symbols = symbols
        self.options = options
        self._ids = {symbol: index for index, symbol in enumerate(symbols)}
        special = options.special_ids
        if special is None:
            special = (0, *(index for index, symbol in enumerate(symbols) if symbol in SPECIAL_TOKENS))
        self._special = frozenset(special)
        self._texts = [
            "" if index in self._special else symbol.replace(options.word_separator, " ")
            for index, symbol in enumerate(symbols)
        ]
        # A model that cannot be read is found when the checkpoint is loaded, not at the first prompt.
        self._processor = load_processor(sentencepiece) if sentencepiece else None
        self.supports_encode = self._processor is not None or self._is_character_table

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> SymbolTableTokenizer:
        """Build from the file roles ``symbols`` and ``sentencepiece``; ``CheckpointError`` names file and line."""
        options = parse_options(SymbolTableOptions, spec.kind, spec.options)
        path = required_file(spec.kind, spec.files, "symbols", {"symbols", "sentencepiece"})
        symbols = read_symbol_table(path)
        outside = [index for index in options.special_ids or () if not 0 <= index < len(symbols)]
        if outside:
            raise CheckpointError(f"special_ids {outside} are not in {path}, whose ids are 0 to {len(symbols) - 1}.")
        return cls(symbols, options, spec.files.get("sentencepiece"))

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.symbols)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that spell nothing."""
        return self._special

    def detokenizer(self) -> Detokenizer:
        """A fresh state that holds spaces back until a character follows."""
        return _Joiner(self)

    def text_of(self, token: int) -> str:
        """The unit as it stands in a text, with spaces; ``CheckpointError`` for an id that the table lacks."""
        if not 0 <= token < len(self._texts):
            raise CheckpointError(
                f"Token id {token} is not in the symbol table, whose ids are 0 to {len(self._texts) - 1}: "
                "the table and the weights do not belong together."
            )
        return self._texts[token]

    def encode(self, text: str, *, strict: bool = True) -> list[int]:
        """Ids of ``text``.

        A unit that the table lacks raises ``RequestRefusedError``; with ``strict=False`` it becomes ``<unk>``.
        """
        if not self.supports_encode:
            raise RequestRefusedError(
                "This checkpoint cannot encode text: its units are not single characters, and it ships no "
                "SentencePiece model (file role 'sentencepiece')."
            )
        unknown = None if strict else self._ids.get("<unk>")
        ids = []
        for unit in self._units(text):
            index = self._ids.get(unit, unknown)
            if index is None or index in self._special:
                raise RequestRefusedError(f"{text!r} cannot be encoded: {unit!r} is not among the checkpoint's units.")
            ids.append(index)
        return ids

    def _units(self, text: str) -> list[str]:
        separator = self.options.word_separator
        case = self.options.case or ("upper" if self._processor else "keep")
        text = {"upper": text.upper(), "lower": text.lower(), "keep": text}[case]
        if self._processor is None:
            return [separator if character.isspace() else character for character in text.strip()]
        units: list[str] = []
        for part in _IDEOGRAPH.split(text):
            if _IDEOGRAPH.fullmatch(part):
                units.append(part)
            elif part.strip():
                units.extend(piece.replace("▁", separator) for piece in self._processor.encode(part, out_type=str))
        return units

    @cached_property
    def _is_character_table(self) -> bool:
        speech = [
            symbol
            for index, symbol in enumerate(self.symbols)
            if index not in self._special and not _NON_SPEECH.fullmatch(symbol)
        ]
        return all(len(symbol) == 1 for symbol in speech)


class _Joiner:
    """Joins units; spaces wait until a character follows, so that both ends of the text are stripped."""

    def __init__(self, tokenizer: SymbolTableTokenizer) -> None:
        self._tokenizer = tokenizer
        self._between = ""
        self._waiting = ""
        self._started = False

    def step(self, token: int) -> str:
        piece = self._tokenizer.text_of(token)
        if token in self._tokenizer.special_ids:
            return ""
        text = self._waiting + self._between + piece
        self._between = self._tokenizer.options.connect_symbol
        if not self._started:
            text = text.lstrip()
        certain = text.rstrip()
        self._waiting = text[len(certain) :]
        self._started = self._started or bool(certain)
        return certain

    def finish(self) -> str:
        self._waiting = ""
        return ""


def read_symbol_table(path: Path) -> list[str]:
    """Units by id. Lines are ``unit id`` in any order; ``CheckpointError`` names the line at fault."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise CheckpointError(f"Symbol table {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"Symbol table {path} is not UTF-8 text (byte {error.start}).") from error
    by_id: dict[int, tuple[str, int]] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].isascii() or not fields[1].isdigit():
            raise CheckpointError(f"{path}, line {number}: expected 'unit id', got {line.strip()!r}.")
        symbol, index = fields[0], int(fields[1])
        if index in by_id:
            raise CheckpointError(f"{path}, line {number}: id {index} stands already in line {by_id[index][1]}.")
        if symbol in line_of:
            raise CheckpointError(f"{path}, line {number}: unit {symbol!r} stands already in line {line_of[symbol]}.")
        by_id[index] = (symbol, number)
        line_of[symbol] = number
    if not by_id:
        raise CheckpointError(f"Symbol table {path} is empty; expected lines of 'unit id'.")
    missing = next(index for index in range(len(by_id) + 1) if index not in by_id)
    if missing != len(by_id):
        following = min(index for index in by_id if index > missing)
        raise CheckpointError(
            f"{path}, line {by_id[following][1]}: id {following} is there, but no line has id {missing}; "
            "ids must run from 0 without a gap."
        )
    return [by_id[index][0] for index in range(len(by_id))]
