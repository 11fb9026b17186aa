"""Models with random weights, for benchmarks and tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from oasr_conformer.config import ConformerConfig
from oasr_conformer.model import ConformerModel


def random_config(*, vocab_size: int = 5000, decoder: dict[str, Any] | None = None, **encoder: Any) -> dict[str, Any]:
    """A bundle's ``config``: the size of WeNet's large U2 recipe, with the given encoder keys replaced."""
    large = {
        "output_size": 512,
        "attention_heads": 8,
        "linear_units": 2048,
        "num_blocks": 12,
        "conv_causal": True,
        "conv_norm": "layer_norm",
        "dynamic_chunk": True,
    }
    config = {
        "vocab_size": vocab_size,
        "cmvn": True,
        "sos_id": vocab_size - 1,
        "eos_id": vocab_size - 1,
        "encoder": {**large, **encoder},
        "decoder": decoder,
    }
    return ConformerConfig.parse(config).model_dump(mode="json")


def random_model(config: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> ConformerModel:
    """A prepared model of ``config`` with reproducible random weights; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ConformerModel.from_config(config).to(dtype)
    model.prepare()
    return model
