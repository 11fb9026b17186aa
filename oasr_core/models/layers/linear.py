"""Affine maps with fused activation, residual sum and gate."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_core.models.layers.activation import Activation, activate
from oasr_core.models.layers.packing import onednn_serves


class Linear(nn.Linear):
    """``activation(x W^T + b)``, packed for oneDNN's fused kernel where that exists.

    :meth:`pack` gives up :attr:`weight` in favour of the packed form, so that memory is not paid twice: fold and
    read weights before.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, activation: Activation = "none"
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.activation: Activation = activation
        self._packed: Tensor | None = None

    @classmethod
    def from_weights(cls, weight: Tensor, bias: Tensor | None, *, activation: Activation = "none") -> Linear:
        """A layer of these weights: ``weight`` ``(out, in)``, ``bias`` ``(out,)``."""
        with torch.device("meta"):
            layer = cls(weight.shape[1], weight.shape[0], bias=bias is not None, activation=activation)
        layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
        return layer

    def pack(self) -> None:
        """Reorder the weight for the fused CPU kernel; where that kernel is missing, keep the plain form."""
        if self._packed is not None or not onednn_serves(self.weight, "_linear_pointwise", "_reorder_linear_weight"):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        if self._packed is None:
            return activate(F.linear(x, self.weight, self.bias), self.activation)
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, self.activation, [], _variant(self))
        return cast(Tensor, out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + x W^T + b``; only for a layer without activation."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias).add_(residual)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add"))

    def multiply(self, gate: Tensor, x: Tensor) -> Tensor:
        """``gate * (x W^T + b)``; only for a layer without activation."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias).mul_(gate)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._packed, self.bias, "mul"))


def _variant(layer: Linear) -> str:
    """The algorithm argument of the fused kernel, which only gelu has."""
    return "none" if layer.activation == "gelu" else ""
