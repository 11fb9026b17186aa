"""A small model, its bundle, and converters that claim what a test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.converter import CheckpointConverter, Detection
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.models.base import BaseAsrModel, BaseEncoder, EncoderBatch, EncoderOutput
from oasr_core.registry import registry


class TinyEncoder(BaseEncoder):
    subsampling_rate = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feature_dim = self.output_dim = width
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(width, dtype=torch.float32), persistent=False)

    def output_frames(self, feature_frames: int) -> int:
        return feature_frames

    def encode(self, batch: EncoderBatch) -> EncoderOutput:
        return EncoderOutput(self.norm(self.linear(batch.features)) + self.table, batch.lengths)


class TinyModel(BaseAsrModel):
    oasr_api = "1.0"
    architecture = "tiny"
    expected_unused = ("*.pe",)
    capability_drop_hints: ClassVar[Mapping[str, str]] = {"punctuation.*": "punctuation"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = TinyEncoder(width)
        self.head = nn.Linear(width, 3)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseAsrModel:
        return cls(config["width"])

    @property
    def interfaces(self) -> Mapping[str, Any]:
        return {}

    @property
    def vocab_size(self) -> int:
        return 3


@pytest.fixture
def tiny_model() -> Iterator[type[TinyModel]]:
    """The architecture ``tiny``, registered for the test."""
    with registry("models").override("tiny", TinyModel):
        yield TinyModel


@pytest.fixture
def tiny_weights() -> dict[str, Tensor]:
    """Weights that fit ``tiny`` with width 4."""
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in TinyModel(4).state_dict().items()}


@pytest.fixture
def tiny_bundle(tiny_model: type[TinyModel], tiny_weights: dict[str, Tensor], tmp_path: Path) -> CheckpointBundle:
    """A bundle of ``tiny`` with a symbol table."""
    symbols = tmp_path / "origin" / "units.txt"
    symbols.parent.mkdir()
    symbols.write_text("<blank> 0\nA 1\n▁B 2\n", encoding="utf-8")
    return CheckpointBundle(
        architecture="tiny",
        config={"width": 4},
        state_dict=tiny_weights,
        tokenizer=TokenizerSpec("symbol_table", {"symbols": symbols}, {"special_ids": [0]}),
        feature=FeatureSpec("fbank", 32768.0, {"num_mel_bins": 4}),
        decoding=DecodingDefaults("ctc", {}, chunk_size=16, num_left_chunks=-1),
        source=str(symbols.parent),
        converter="test",
    )


@pytest.fixture
def make_converter() -> Callable[..., type[CheckpointConverter]]:
    """Makes a converter class whose ``detect`` and ``convert`` do what they are given."""

    def make(
        rank: int | None = None,
        *,
        bundle: Callable[[CheckpointPeek, str | None], Any] | None = None,
        error: Exception | None = None,
        architectures: tuple[str, ...] = ("tiny",),
        wants: str = "marker.txt",
    ) -> type[CheckpointConverter]:
        made_architectures = architectures

        class Made(CheckpointConverter):
            oasr_api = "1.0"
            looks_for = (wants,)
            architectures = made_architectures

            def detect(self, peek: CheckpointPeek) -> Detection | None:
                if error is not None:
                    raise error
                return Detection(rank, wants) if rank is not None and peek.exists(wants) else None

            def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
                return bundle(peek, checkpoint_name) if bundle else None

        return Made

    return make
