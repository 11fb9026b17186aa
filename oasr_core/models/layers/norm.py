"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last axis; ``eps`` is stated by every caller because families differ in it."""

    __call__: Callable[..., Tensor]

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self._wide: tuple[Tensor, Tensor] | None = None

    def pack(self) -> None:
        """Keep float32 copies of a bfloat16 affine map: the CPU kernel takes them as they are, and runs faster."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16:
            self._wide = self.weight.detach().float(), self.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to the same."""
        weight, bias = self._wide if self._wide is not None else (self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
