"""The ``zipformer`` architecture: encoder, CTC head, stateless transducer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.base import BaseAsrModel
from oasr_core.models.layers import Linear, pack_modules
from oasr_transducer.networks import Joiner, StatelessPredictor, Transducer
from oasr_zipformer.config import ZipformerConfig
from oasr_zipformer.encoder import ZipformerEncoder


class CtcHead(nn.ModuleList):
    """Interface ``ctc``; its linear layer stands behind a dropout, which only its name remembers."""

    def __init__(self, dim: int, vocab_size: int, blank_id: int) -> None:
        super().__init__([nn.Identity(), Linear(dim, vocab_size)])
        self.blank_id = blank_id
        self.vocab_size = vocab_size

    def log_probs(self, hidden: Tensor) -> Tensor:
        """``(batch, frames, dim)`` to ``(batch, frames, vocab)`` float32 log posteriors."""
        return F.log_softmax(self[1](hidden), dim=-1, dtype=torch.float32)


class ZipformerModel(BaseAsrModel):
    """icefall's Zipformer2 with a CTC head, a stateless transducer, or both."""

    oasr_api = "1.0"
    architecture: ClassVar[str] = "zipformer"
    # Projections of the pruned training loss, and a bypass that icefall created and never used.
    expected_unused: ClassVar[tuple[str, ...]] = (
        "simple_am_proj.*",
        "simple_lm_proj.*",
        "*.layers.*.bypass_scale",
    )
    capability_drop_hints: ClassVar[Mapping[str, str]] = {"attention_decoder.*": "attention decoder"}

    encoder: ZipformerEncoder

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = ZipformerEncoder(config.encoder)
        dim, vocab_size = config.encoder.output_dim, config.vocab_size
        self._interfaces: dict[str, Any] = {}
        if config.ctc:
            self.ctc_output = CtcHead(dim, vocab_size, config.blank_id)
            self._interfaces["ctc"] = self.ctc_output
        if config.transducer is not None:
            parts = config.transducer
            self.decoder = StatelessPredictor(vocab_size, parts.decoder_dim, parts.context_size)
            self.joiner = Joiner(dim, parts.decoder_dim, parts.joiner_dim, vocab_size)
            self._interfaces["transducer"] = Transducer(
                self.decoder, self.joiner, vocab_size, blank_id=config.blank_id, unk_id=config.unk_id
            )
        self._prepared = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ZipformerModel:
        """Build from a bundle's config; raises ``CheckpointError`` for unknown or contradictory keys."""
        return cls(ZipformerConfig.parse(config))

    @property
    def interfaces(self) -> Mapping[str, Any]:
        """``ctc`` and ``transducer``, as the checkpoint has them."""
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
        if "transducer" in self._interfaces:
            self.decoder.prepare()
        pack_modules(self)
        self._prepared = True
