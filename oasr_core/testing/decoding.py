"""Scripted posteriors and a byte-level tokenizer: tests of decoding and text without a network."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.models.base import EncoderOutput
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Run:
    """``frames`` frames in which ``token`` has ``posterior``; the other labels share the rest evenly."""

    token: int
    frames: int = 1
    posterior: float = 0.9


def scripted_log_probs(
    scripts: Sequence[Sequence[Run]], vocab_size: int, *, padding: float = math.nan
) -> tuple[Tensor, Tensor]:
    """Log posteriors ``(batch, frames, vocab)`` float32 and lengths ``(batch,)`` int64 of scripted utterances.

    Frames past a script's end hold ``padding``, by default NaN, which no decoder may look at. Raises ``ValueError`` for
    a token outside the vocabulary or a posterior outside ``[0, 1]``.
    """
    lengths = torch.tensor([sum(run.frames for run in script) for script in scripts], dtype=torch.int64)
    longest = max(lengths.tolist(), default=0)
    log_probs = torch.full((len(scripts), longest, vocab_size), padding)
    for row, script in enumerate(scripts):
        frame = 0
        for run in script:
            if not 0 <= run.token < vocab_size or not 0.0 <= run.posterior <= 1.0:
                raise ValueError(f"{run} does not fit a vocabulary of {vocab_size} labels and posteriors in [0, 1]")
            rest = (1.0 - run.posterior) / (vocab_size - 1) if vocab_size > 1 else 0.0
            probs = torch.full((vocab_size,), rest)
            probs[run.token] = run.posterior
            log_probs[row, frame : frame + run.frames] = probs.log()
            frame += run.frames
    return log_probs, lengths


def scripted_output(scripts: Sequence[Sequence[Run]], vocab_size: int, *, padding: float = math.nan) -> EncoderOutput:
    """:func:`scripted_log_probs` as an encoder's output (with hidden states of width 1, all zero)."""
    log_probs, lengths = scripted_log_probs(scripts, vocab_size, padding=padding)
    return EncoderOutput(torch.zeros(*log_probs.shape[:2], 1), lengths, log_probs)


class ByteTokenizer(Tokenizer):
    """Id 0 is blank, id ``1 + b`` is the byte ``b`` of UTF-8 text: every character past ASCII is several tokens."""

    oasr_api = "1.0"
    supports_encode = True

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> ByteTokenizer:
        """Needs nothing of the spec."""
        return cls()

    @property
    def vocab_size(self) -> int:
        """256 bytes and the blank."""
        return 257

    @property
    def special_ids(self) -> frozenset[int]:
        """The blank."""
        return frozenset({0})

    def encode(self, text: str) -> list[int]:
        """One id for each byte."""
        return [1 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Broken bytes become U+FFFD."""
        return "".join(self.token_pieces(ids))

    def token_pieces(self, ids: Sequence[int]) -> list[str]:
        """A character belongs to the token that completes it."""
        decoder = self.incremental()
        pieces = [decoder.push([token]) for token in ids]
        if pieces:
            pieces[-1] += decoder.flush()
        return pieces

    def incremental(self) -> IncrementalDecoder:
        """Holds the bytes of an incomplete character back."""
        return _ByteDecoder()


class _ByteDecoder(IncrementalDecoder):
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(bytes(token - 1 for token in ids if token > 0))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
