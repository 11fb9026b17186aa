"""Tokenizer kind ``whisper``: byte-level text tokens, control tokens (``<|en|>``) and timestamps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.tokenizers.byte_level import ByteDetokenizer, token_bytes
from oasr_core.tokenizers.detokenizer import Detokenizer, SteppedTokenizer
from oasr_core.tokenizers.spec import parse_options
from oasr_core.tokenizers.tokenizer_json import Vocabulary, checked_size, read_json

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import TokenizerSpec

_TIMESTAMP_SECONDS = 0.02

# <|0.00|> to <|30.00|>
_TIMESTAMPS = 1501

# Where GPT-2's vocabulary ends, which the English-only models use; the multilingual ones put an empty token before it.
_ENGLISH_ONLY_END = 50256

_TASKS = ("translate", "transcribe")
_ROLES = frozenset({"tokenizer", "config", "vocabulary"})


class WhisperTokenizerOptions(BaseModel):
    """``TokenizerSpec.options`` of a Whisper tokenizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(None, gt=0, description="Ids of the weights. None: up to the last timestamp.")
    timestamp_begin: int | None = Field(
        None, gt=0, description="Id of <|0.00|>. None: by name, or the id after <|notimestamps|>."
    )
    multilingual: bool | None = Field(
        None, description="Whether language and task tokens mean anything. None: by the id of <|endoftext|>."
    )


class WhisperTokenizer(SteppedTokenizer):
    """Whisper's ids: text is decoded from its bytes, control tokens and timestamps spell nothing.

    Files, one of them at least: ``tokenizer`` (``tokenizer.json``, with ``config``, ``tokenizer_config.json``) and
    ``vocabulary`` (``vocabulary.txt`` or ``vocabulary.json`` of a CTranslate2 folder). Encoding needs ``tokenizer``.
    The file of OpenAI-derived checkpoints ends before the timestamps; they are numbered here all the same.

    A text's leading spaces are dropped in all views (Whisper begins every segment with one), so that :meth:`decode` is
    what Hugging Face's gives after ``strip()``, but for spaces at the end.
    """

    oasr_api: ClassVar[str] = "1.0"

    def __init__(
        self,
        tokens: list[str | None],
        options: WhisperTokenizerOptions,
        path: Path,
        encoder: Vocabulary | None = None,
    ) -> None:
        self.options = options
        self.supports_encode = encoder is not None
        self._path = path
        self._encoder = encoder
        self._ids = {token: index for index, token in enumerate(tokens) if token is not None}
        #: ``<|endoftext|>``; ids from here on are no text.
        self.eot_id = self._control("<|endoftext|>")
        #: ``<|startoftranscript|>``
        self.sot_id = self._control("<|startoftranscript|>")
        #: ``<|startofprev|>``, before the text of an earlier window or a prompt.
        self.sot_prev_id = self._control("<|startofprev|>")
        #: ``<|nospeech|>``, named ``<|nocaptions|>`` in early checkpoints.
        self.no_speech_id = self._control("<|nospeech|>", "<|nocaptions|>")
        #: ``<|notimestamps|>``
        self.no_timestamps_id = self._control("<|notimestamps|>")
        #: ``<|0.00|>``; timestamps are 0.02 s apart.
        self.timestamp_begin = self._first_timestamp()
        own = max(len(tokens), self.timestamp_begin + _TIMESTAMPS) if options.vocab_size is None else len(tokens)
        self._size = checked_size(path, own, options.vocab_size)
        #: Ids after the last timestamp.
        self.timestamp_end = min(self._size, self.timestamp_begin + _TIMESTAMPS)
        multilingual = options.multilingual
        #: Whether language and task tokens mean anything to the model.
        self.is_multilingual = self.eot_id != _ENGLISH_ONLY_END if multilingual is None else multilingual
        self._special = frozenset(
            index
            for index in range(self._size)
            if index >= len(tokens)
            or self.timestamp_begin <= index < self.timestamp_end
            or (index >= self.eot_id and _is_control(tokens[index]))
        )
        self._spelling = [
            b"" if index in self._special else token_bytes(tokens[index] or "") for index in range(self._size)
        ]
        tasks = {name: index for name in _TASKS if (index := self._ids.get(f"<|{name}|>")) is not None}
        languages = range(self.sot_id + 1, min(tasks.values(), default=0))
        named = {token[2:-2]: index for index in languages if (token := tokens[index]) is not None}
        #: Language code -> id; empty for English-only models, whose tokens of these names are untrained.
        self.language_ids: Mapping[str, int] = MappingProxyType(named if self.is_multilingual else {})
        #: ``"transcribe"`` and ``"translate"`` -> id; empty for English-only models.
        self.task_ids: Mapping[str, int] = MappingProxyType(tasks if self.is_multilingual else {})

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> WhisperTokenizer:
        """Build from the file roles ``tokenizer``, ``config`` and ``vocabulary``."""
        options = parse_options(WhisperTokenizerOptions, spec.kind, spec.options)
        source, listed = spec.files.get("tokenizer"), spec.files.get("vocabulary")
        wrong_files = CheckpointError(
            f"Tokenizer {spec.kind!r} got files {sorted(spec.files)}, needs 'tokenizer' (with 'config' or without) "
            f"or 'vocabulary' and knows {sorted(_ROLES)}: the converter or the native bundle is at fault."
        )
        if not set(spec.files) <= _ROLES:
            raise wrong_files
        if source is None:
            if listed is None or "config" in spec.files:
                raise wrong_files
            return cls([*read_vocabulary(listed)], options, listed)
        vocabulary = Vocabulary.read(source, spec.files.get("config"))
        if not vocabulary.is_byte_level:
            raise CheckpointError(f"{source} has no ByteLevel decoder, so it is not of a Whisper model.")
        made = cls(vocabulary.tokens, options, source, vocabulary)
        if listed is not None:
            made._check_listing(listed)
        return made

    @property
    def vocab_size(self) -> int:
        """Number of ids, timestamps included."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that spell nothing: control tokens, timestamps, and ids without a token."""
        return self._special

    def is_timestamp(self, token: int) -> bool:
        """Whether ``token`` is one of ``<|0.00|>`` to ``<|30.00|>``."""
        return self.timestamp_begin <= token < self.timestamp_end

    def timestamp_seconds(self, token: int) -> float:
        """Seconds from the start of the window; ``CheckpointError`` for an id that is no timestamp."""
        if not self.is_timestamp(token):
            raise CheckpointError(
                f"Token id {token} is no timestamp; those are {self.timestamp_begin} to {self.timestamp_end - 1}."
            )
        return round((token - self.timestamp_begin) * _TIMESTAMP_SECONDS, 2)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, leading spaces kept; ``RequestRefusedError`` where it spells a timestamp token."""
        if self._encoder is None:
            raise RequestRefusedError(
                f"This checkpoint cannot encode text: {self._path.name} lists its tokens, and it ships no "
                "tokenizer.json (file role 'tokenizer')."
            )
        ids = self._encoder.encode(text)
        control = next((index for index in ids if index in self._special), None)
        if control is not None:
            token = self._encoder.tokens[control]
            raise RequestRefusedError(f"{text!r} cannot be encoded: {token} is a control token; leave it out.")
        return ids

    def detokenizer(self) -> Detokenizer:
        """A fresh state that holds incomplete characters back and drops leading spaces."""
        return ByteDetokenizer(self._bytes_of, strips_leading_spaces=True)

    def _bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            raise CheckpointError(
                f"Token id {token} is not in {self._path}, whose ids are 0 to {self._size - 1}: "
                "the tokenizer and the weights do not belong together."
            )
        return self._spelling[token]

    def _control(self, *names: str) -> int:
        """The id of the control token of one of these ``names``."""
        for name in names:
            if name in self._ids:
                return self._ids[name]
        raise CheckpointError(f"{self._path} has no token {names[0]}, so it is not of a Whisper model.")

    def _first_timestamp(self) -> int:
        named, declared = self._ids.get("<|0.00|>"), self.options.timestamp_begin
        if named is not None and declared is not None and named != declared:
            raise CheckpointError(f"timestamp_begin={declared}, but in {self._path} the id of <|0.00|> is {named}.")
        return declared or named or self.no_timestamps_id + 1

    def _check_listing(self, listed: Path) -> None:
        """``CheckpointError`` where ``vocabulary.*`` and ``tokenizer.json`` spell a text token differently."""
        text = self._spelling[: self.eot_id]
        for index, (token, spelled) in enumerate(zip(read_vocabulary(listed), text, strict=False)):
            if token_bytes(token) != spelled:
                raise CheckpointError(
                    f"Token id {index} is {token!r} in {listed}, but spells {spelled.decode('utf-8', 'replace')!r} in "
                    f"{self._path}: the files are from different checkpoints."
                )


def read_vocabulary(path: Path) -> list[str]:
    """Tokens by id of a CTranslate2 ``vocabulary.json`` (a list) or ``vocabulary.txt`` (one a line)."""
    if path.suffix == ".json":
        content = read_json(path)
        if not isinstance(content, list) or not content or not all(isinstance(token, str) for token in content):
            raise CheckpointError(f"{path} is no vocabulary: a list of tokens is expected.")
        return content
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise CheckpointError(f"{path} is empty; expected one token a line.")
    return [line.removesuffix("\r") for line in lines]


def _is_control(token: str | None) -> bool:
    return token is None or (token.startswith("<|") and token.endswith("|>"))
