"""The ``whisper`` architecture: a fixed-window encoder and an attention decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from oasr_core.models.base import BaseAsrModel
from oasr_core.models.layers import pack_modules
from oasr_whisper.config import WhisperConfig
from oasr_whisper.decoder import AedHead, WhisperDecoder
from oasr_whisper.encoder import WhisperEncoder


class WhisperModel(BaseAsrModel):
    """Whisper of any size, multilingual or English-only, and models of its kind (turbo, distilled)."""

    oasr_api = "1.0"
    architecture: ClassVar[str] = "whisper"

    encoder: WhisperEncoder

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)
        self._interfaces = {"aed": AedHead(self.decoder, config)}
        self._prepared = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> WhisperModel:
        """Build from a bundle's config; raises ``CheckpointError`` for unknown or contradictory keys."""
        return cls(WhisperConfig.parse(config))

    @property
    def interfaces(self) -> Mapping[str, AedHead]:
        """``aed``."""
        return self._interfaces

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones and timestamps included."""
        return self.config.vocab_size

    @torch.no_grad()
    def prepare(self) -> None:
        """Tie the output projection to the embedding and pack all weights for the kernels of this device and dtype."""
        if self._prepared:
            return
        self.eval().requires_grad_(False)
        self.decoder.tie()
        pack_modules(self)
        self._prepared = True
