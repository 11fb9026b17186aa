"""Activation functions by name."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "relu", "gelu", "swish", "sigmoid"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply ``activation`` in place where torch has an in-place kernel (``gelu`` is the exact, erf one)."""
    if activation == "none":
        return x
    if activation == "relu":
        return F.relu_(x)
    if activation == "swish":
        return F.silu(x, inplace=True)
    if activation == "sigmoid":
        return x.sigmoid_()
    return F.gelu(x)
