"""Weight packing: one walk over a network turns weights into the form that the fastest kernel reads."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Packable(Protocol):
    """A layer whose weights have a second, faster form."""

    def pack(self) -> None:
        """Choose the kernel for this device and dtype and reorder the weights for it; a second call does nothing."""
        ...


def pack_modules(root: nn.Module) -> None:
    """Pack every packable layer below ``root``. Weights must be loaded, cast and moved before."""
    for module in root.modules():
        if isinstance(module, Packable):
            module.pack()


def onednn_serves(weight: Tensor, *operators: str) -> bool:
    """Whether torch has the prepacked oneDNN ``operators`` for ``weight`` (CPU; bfloat16 where the CPU has it)."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in (*operators, "_is_mkldnn_bf16_supported")):
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
