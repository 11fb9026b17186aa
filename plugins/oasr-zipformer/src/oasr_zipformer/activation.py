"""The Swoosh activations without their constant, which :func:`fold_constant` moves into the following layer."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Swoosh = Literal["L", "R"]

_SHIFT: dict[Swoosh, float] = {"L": 4.0, "R": 1.0}
#: What ``SwooshX(x) = log(1 + exp(x - shift)) - 0.08 x - constant`` subtracts last ("Zipformer", Yao et al. 2023).
CONSTANT: dict[Swoosh, float] = {"L": 0.035, "R": 0.313261687}


# Keeps what lies in padding finite, where a frame may equal the bias.
_MIN_LENGTH = 1e-12


def swoosh(x: Tensor, kind: Swoosh) -> Tensor:
    """``log(1 + exp(x - shift)) - 0.08 x``."""
    return F.softplus(x - _SHIFT[kind]).sub_(x, alpha=0.08)


def fold_constant(layer: nn.Linear | nn.Conv2d, kind: Swoosh) -> None:
    """Subtract the activation's constant, as ``layer`` maps it, from the bias of ``layer`` (which pads nothing)."""
    assert layer.bias is not None
    shift = layer.weight.detach().float().flatten(1).sum(1) * CONSTANT[kind]
    layer.bias = nn.Parameter((layer.bias.detach().float() - shift).to(layer.bias.dtype), requires_grad=False)


class BiasNorm(nn.Module):
    """``x * exp(log_scale) / rms(x - bias)``, over the last axis: the bias counts in the norm alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.0))
        self.bias = nn.Parameter(torch.zeros(dim))
        self._gain: Tensor | None = None

    def pack(self) -> None:
        """Compute the gain ``exp(log_scale) * sqrt(dim)`` once."""
        self._gain = self.log_scale.detach().float().exp() * self.bias.numel() ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to the same."""
        assert self._gain is not None  # prepare() ran
        length = torch.linalg.vector_norm(x - self.bias, dim=-1, keepdim=True, dtype=torch.float32)
        scale: Tensor = self._gain / length.clamp_(min=_MIN_LENGTH)
        return x * scale.to(x.dtype)


class Bypass(nn.Module):
    """``before + (after - before) * bypass_scale``, a scale per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bypass_scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Mix two tensors ``(..., dim)`` that broadcast."""
        return torch.lerp(before, after, self.bypass_scale)
