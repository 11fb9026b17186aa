"""The layer waist: the building blocks that every architecture is made of.

Networks are built from these classes, so that weight packing and quantization reach every model through one place.
"""

from __future__ import annotations

from oasr_core.models.layers.activation import Activation, activate
from oasr_core.models.layers.attention import MASKED, attention, length_bias
from oasr_core.models.layers.convolution import Conv2d, DepthwiseConv1d
from oasr_core.models.layers.linear import Linear
from oasr_core.models.layers.norm import LayerNorm
from oasr_core.models.layers.packing import Packable, pack_modules
from oasr_core.models.layers.positions import sinusoids

__all__ = [
    "MASKED",
    "Activation",
    "Conv2d",
    "DepthwiseConv1d",
    "LayerNorm",
    "Linear",
    "Packable",
    "activate",
    "attention",
    "length_bias",
    "pack_modules",
    "sinusoids",
]
