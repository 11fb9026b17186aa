"""Normalisation layers."""

from __future__ import annotations

from torch import nn


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last axis; ``eps`` is stated by every caller because families differ in it."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__(dim, eps=eps)
