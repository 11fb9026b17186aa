"""Sinusoidal positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoids(positions: int, dim: int, *, device: torch.device | None = None) -> Tensor:
    """Interleaved sines and cosines, ``(positions, dim)`` float32.

    ``table[p, 2i] = sin(p w_i)``, ``table[p, 2i+1] = cos(p w_i)``, ``w_i = 10000^(-2i/dim)`` (Vaswani et al. 2017).
    """
    position = torch.arange(positions, dtype=torch.float32, device=device).unsqueeze(1)
    rate = torch.exp(torch.arange(0, dim, 2, dtype=torch.float32, device=device) * -(math.log(10000.0) / dim))
    table = torch.empty(positions, dim, device=device)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate[: dim // 2])
    return table
