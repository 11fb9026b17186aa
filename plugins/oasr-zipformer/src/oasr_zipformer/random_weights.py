"""Models with random weights, for benchmarks and tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from oasr_zipformer.config import ZipformerConfig
from oasr_zipformer.model import ZipformerModel

#: icefall's default network ("medium", 65 million parameters with a vocabulary of 500).
_MEDIUM = {
    "num_layers": (2, 2, 3, 4, 3, 2),
    "downsampling": (1, 2, 4, 8, 4, 2),
    "dim": (192, 256, 384, 512, 384, 256),
    "feedforward_dim": (512, 768, 1024, 1536, 1024, 768),
    "num_heads": (4, 4, 4, 8, 4, 4),
    "conv_kernel": (31, 31, 15, 15, 15, 31),
}


def random_config(
    *, vocab_size: int = 500, transducer: dict[str, Any] | None = None, ctc: bool = True, **encoder: Any
) -> dict[str, Any]:
    """A bundle's ``config``: icefall's default dimensions, streaming, with the given encoder keys replaced."""
    stacks = [dict(zip(_MEDIUM, values, strict=True)) for values in zip(*_MEDIUM.values(), strict=True)]
    config = {
        "vocab_size": vocab_size,
        "ctc": ctc,
        "transducer": transducer,
        "encoder": {"causal": True, "stacks": stacks, **encoder},
    }
    return ZipformerConfig.parse(config).model_dump(mode="json")


def random_model(config: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> ZipformerModel:
    """A prepared model of ``config`` with reproducible random weights; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ZipformerModel.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("chunkwise_conv_scale", "norm.bias", "downsample.bias", "downsample_output.bias")):
                torch.nn.init.normal_(parameter, std=0.1)  # constants in a new network, not in a trained one
    model = model.to(dtype)
    model.prepare()
    return model
