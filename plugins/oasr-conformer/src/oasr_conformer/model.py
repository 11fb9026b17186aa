"""The ``conformer`` architecture: encoder, CTC head, attention decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_conformer.config import ConformerConfig
from oasr_conformer.decoder import AttentionDecoder, BidirectionalDecoder, DecoderScorer
from oasr_conformer.encoder import ConformerEncoder
from oasr_core.models.base import BaseAsrModel
from oasr_core.models.layers import Linear, pack_modules

# Rows of the softmax at a time on the CPU: what stays in the cache halves its cost.
_ROWS = 128


class CtcHead(nn.Module):
    """Interface ``ctc``."""

    def __init__(self, dim: int, vocab_size: int, blank_id: int) -> None:
        super().__init__()
        self.blank_id = blank_id
        self.vocab_size = vocab_size
        self.ctc_lo = Linear(dim, vocab_size)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to ``(batch, frames, vocab)`` float32 log posteriors."""
        logits = self.ctc_lo(hidden)
        if logits.requires_grad or logits.device.type != "cpu":
            return F.log_softmax(logits, dim=-1, dtype=torch.float32)
        out = torch.empty(logits.shape, dtype=torch.float32)
        flat, into = logits.flatten(0, -2), out.flatten(0, -2)
        for start in range(0, len(flat), _ROWS):
            rows = slice(start, start + _ROWS)
            torch.log_softmax(flat[rows], dim=-1, dtype=torch.float32, out=into[rows])
        return out


class ConformerModel(BaseAsrModel):
    """WeNet ASR model (U2, U2++, and their Transformer ancestors)."""

    oasr_api = "1.0"
    architecture: ClassVar[str] = "conformer"
    # Constant position tables, layers that WeNet created and never used, and training counters.
    expected_unused: ClassVar[tuple[str, ...]] = (
        "*.pe",
        "*.concat_linear.*",
        "*.concat_linear1.*",
        "*.concat_linear2.*",
        "*.num_batches_tracked",
    )

    encoder: ConformerEncoder

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.encoder.output_size
        self.encoder = ConformerEncoder(config.encoder, config.input_dim, cmvn=config.cmvn)
        self.ctc = CtcHead(dim, config.vocab_size, config.blank_id)
        self.decoder = _build_decoder(config)
        self._interfaces: dict[str, Any] = {"ctc": self.ctc}
        if self.decoder is not None:
            self._interfaces["aed_scorer"] = DecoderScorer(
                self.decoder, sos_id=config.sos_id, eos_id=config.eos_id, reverse_weight=config.reverse_weight
            )
        self._prepared = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ConformerModel:
        """Build from a bundle's config; raises ``CheckpointError`` for unknown or contradictory keys."""
        return cls(ConformerConfig.parse(config))

    @property
    def interfaces(self) -> Mapping[str, Any]:
        """``ctc``, and ``aed_scorer`` where the checkpoint has decoders."""
        return self._interfaces

    @property
    def vocab_size(self) -> int:
        """Number of output units."""
        return self.config.vocab_size

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold, fuse and pack; from here on the weights no longer carry the checkpoint's names."""
        if self._prepared:
            return
        self.eval().requires_grad_(False)
        self.encoder.fold()
        pack_modules(self)
        self._prepared = True


def _build_decoder(config: ConformerConfig) -> AttentionDecoder | BidirectionalDecoder | None:
    decoder, dim = config.decoder, config.encoder.output_size
    if decoder is None:
        return None
    if decoder.kind == "bitransformer":
        return BidirectionalDecoder(decoder, dim, config.vocab_size)
    return AttentionDecoder(decoder, decoder.num_blocks, dim, config.vocab_size)
