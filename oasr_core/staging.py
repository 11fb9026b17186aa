"""Small facts of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host numbers (nested sequences of one shape) on ``device``.

    For CUDA it is built in page-locked memory and copied without waiting: a copy out of ordinary memory would wait for
    everything that is queued on the stream. Readers on the same stream need no further order.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
