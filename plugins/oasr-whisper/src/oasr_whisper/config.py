"""The network configuration of the ``whisper`` architecture and its special tokens (torch-free, JSON types)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oasr_core.errors import CheckpointError, did_you_mean

#: Feature frames per encoder frame.
SUBSAMPLING = 2
#: Seconds between timestamp tokens, and between encoder frames.
TIMESTAMP_SECONDS = 0.02
#: Vocabularies of OpenAI's multilingual models have at least as many tokens, those of the English-only ones fewer.
MULTILINGUAL_VOCAB = 51865


@dataclass(frozen=True)
class WhisperTokens:
    """Ids with a meaning, and which ids a checkpoint never lets out.

    A prompt is ``sot``, and on a multilingual model a language and ``transcribe`` or ``translate``, and without
    timestamps ``no_timestamps``. ``timestamp_begin + i`` stands for ``i * 0.02`` seconds, ``timestamp_begin`` being
    ``<|0.00|>``. Context goes in front, behind ``sot_prev``.
    """

    #: Pydantic's settings for the validation of a bundle's config.
    __pydantic_config__ = ConfigDict(extra="forbid")

    sot: int
    eot: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    transcribe: int
    translate: int
    timestamp_begin: int
    #: Language code -> id, ``{"en": 50259, ...}``; empty for a model that knows only English.
    language_ids: Mapping[str, int]
    multilingual: bool
    #: ``(decoder layer, head)`` of the cross-attention heads that follow the audio, in the order of ``cross_scores``.
    alignment_heads: tuple[tuple[int, int], ...]
    #: Ids that are masked at every step.
    suppress: tuple[int, ...] = ()
    #: Ids that are masked, too, at the first step behind the prompt.
    begin_suppress: tuple[int, ...] = ()
    #: The first timestamp is at most this many steps of 0.02 s.
    max_initial_timestamp_index: int = 50


class WhisperConfig(BaseModel):
    """Everything that :meth:`oasr_whisper.model.WhisperModel.from_config` needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=1)
    n_mels: int = Field(80, gt=0)
    dim: int = Field(gt=0, multiple_of=2)
    encoder_layers: int = Field(gt=0)
    encoder_heads: int = Field(gt=0)
    encoder_ffn_dim: int = Field(gt=0)
    decoder_layers: int = Field(gt=0)
    decoder_heads: int = Field(gt=0)
    decoder_ffn_dim: int = Field(gt=0)
    max_source_positions: int = Field(1500, gt=0, description="Encoder frames of a window.")
    max_target_positions: int = Field(448, gt=0, description="Decoder positions: prompt and generated tokens together.")
    tokens: WhisperTokens

    @model_validator(mode="after")
    def _fits(self) -> WhisperConfig:
        for name in ("encoder_heads", "decoder_heads"):
            heads = getattr(self, name)
            if self.dim % heads:
                raise ValueError(f"dim {self.dim} is no multiple of {name} {heads}")
        if not self.tokens.alignment_heads:
            raise ValueError("tokens.alignment_heads is empty: nothing would align tokens with frames")
        outside = [pair for pair in self.tokens.alignment_heads if not self._has_head(*pair)]
        if outside:
            raise ValueError(
                f"alignment_heads {outside} do not exist: the decoder has {self.decoder_layers} layers with "
                f"{self.decoder_heads} heads"
            )
        ids = {name: value for name, value in vars(self.tokens).items() if name in _TOKEN_IDS}
        ids |= self.tokens.language_ids
        beyond = {name: value for name, value in ids.items() if not 0 <= value < self.vocab_size}
        if beyond:
            raise ValueError(f"token ids {beyond} lie outside of the vocabulary of {self.vocab_size}")
        return self

    def _has_head(self, layer: int, head: int) -> bool:
        return 0 <= layer < self.decoder_layers and 0 <= head < self.decoder_heads

    @property
    def window_frames(self) -> int:
        """Feature frames of the fixed window."""
        return SUBSAMPLING * self.max_source_positions

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str = "the bundle's config") -> WhisperConfig:
        """Validate a bundle's ``config``; raises ``CheckpointError`` naming the key, its value and what is allowed."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            raise CheckpointError(f"whisper: {source} is not usable. {_describe(error)}") from error


_TOKEN_IDS = frozenset(
    ("sot", "eot", "sot_prev", "no_speech", "no_timestamps", "transcribe", "translate", "timestamp_begin")
)


def _describe(error: ValidationError) -> str:
    """One sentence per fault, with the nearest known name for an unknown key."""
    sentences = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"]]
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = WhisperTokens.__annotations__ if len(path) > 1 else WhisperConfig.model_fields
            sentences.append(f"Unknown key {'.'.join(path)!r}.{did_you_mean(path[-1], known)}")
        else:
            given = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            sentences.append(f"{'.'.join(path) + ': ' if path else ''}{fault['msg']}{given}.")
    return " ".join(sentences)
