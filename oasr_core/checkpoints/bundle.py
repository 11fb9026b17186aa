"""Everything about a checkpoint that travels with it: :class:`CheckpointBundle` and its specs (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer to build: registry ``kind``, the files it reads (role -> path) and options (JSON types)."""

    kind: str
    files: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureSpec:
    """Which features the weights were trained on.

    ``kind`` is the registry key of the frontend; ``options`` are fields of that frontend's ``options_cls``
    (``FeatureConfig`` for the Kaldi kinds). ``audio_scale`` is multiplied into the waveform in [-1, 1].
    """

    kind: str = "fbank"
    audio_scale: float = 32768.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodingDefaults:
    """What the checkpoint was made to be decoded with; ``chunk_size`` in encoder frames."""

    decode_method: str = "ctc"
    options: Mapping[str, Any] = field(default_factory=dict)
    chunk_size: int | None = None
    num_left_chunks: int | None = None


@dataclass
class CheckpointBundle:
    """A converted checkpoint: architecture key, network config (JSON types), weights and specs."""

    architecture: str
    config: Mapping[str, Any]
    state_dict: Mapping[str, Tensor]
    tokenizer: TokenizerSpec
    feature: FeatureSpec
    decoding: DecodingDefaults = field(default_factory=DecodingDefaults)
    source: str = ""
    converter: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
