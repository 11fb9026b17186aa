"""Scaled dot-product attention over ``(batch, frames, heads, head_dim)`` tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Added to the scores of masked keys. Finite, so that a row whose keys are all masked stays finite, yet so low that the
#: softmax weight is exactly zero beside any real key.
MASKED = -1e30

# The CPU kernel falls to half its speed for key counts that are no multiple of the vector width.
_KEY_MULTIPLE = 16


def length_bias(lengths: Tensor, keys: int) -> Tensor:
    """``(batch, 1, 1, keys)`` float32: 0 for keys below a row's length, :data:`MASKED` for the rest."""
    past = torch.arange(keys, device=lengths.device) >= lengths.unsqueeze(1)
    return torch.zeros(past.shape, device=lengths.device).masked_fill_(past, MASKED)[:, None, None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention.

    ``query`` ``(batch, queries, heads, head_dim)``, ``key`` and ``value`` ``(batch, keys, heads, head_dim)``, views
    of a fused projection included. ``bias`` float32, broadcastable to ``(batch, heads, queries, keys)``, is added to
    the scaled scores; an axis of size 1 is not materialised. Returns ``(batch, queries, heads, head_dim)``, contiguous.
    """
    missing = -key.shape[1] % _KEY_MULTIPLE
    if missing and not causal and key.shape[1] > _KEY_MULTIPLE and key.device.type == "cpu":
        key, value, bias = _pad_keys(key, value, bias, missing)
    if bias is not None and query.device.type != "cpu":
        bias = bias.to(query.dtype)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
    )
    return out.transpose(1, 2)


def _pad_keys(key: Tensor, value: Tensor, bias: Tensor | None, missing: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append ``missing`` masked keys."""
    if bias is None:
        bias = torch.zeros(1, 1, 1, key.shape[1], device=key.device)
    pad = (0, 0, 0, 0, 0, missing)
    return F.pad(key, pad), F.pad(value, pad), F.pad(bias, (0, missing), value=MASKED)
