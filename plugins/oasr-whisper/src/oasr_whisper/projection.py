"""The projection onto the vocabulary: the largest matrix of a small decoder, read whole for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_core.models.layers import Linear

#: Logits of a row that are exact in half precision; more than a search looks at.
REFINED = 32
#: Steps of the fine int8 row in one of the coarse row.
_FINER = 254
#: Values of which one maximum is taken on the way to the largest of a row.
_BLOCK = 64


class VocabularyProjection:
    """Products of hidden states with the token embeddings, ``(..., dim)`` to ``(..., vocab)`` float32.

    In half precision a product is rounded to a tenth and more where it is large, which makes ties; the
    :data:`REFINED` largest of each row are therefore computed again in float32. As these decide, the first pass may be
    coarse: on the CPU it reads the embeddings in int8, half the bytes, with an error as large as that of bfloat16.
    """

    def __init__(self, embedding: Tensor, exact_ids: Sequence[int] = ()) -> None:
        """``embedding`` ``(vocab, dim)``, in the model's dtype and on its device; ``exact_ids`` are exact whatever they
        are.
        """
        self._embedding = embedding
        self._exact_ids = torch.tensor(exact_ids, dtype=torch.int64, device=embedding.device)
        self._coarse: _Int8Product | Linear
        if embedding.dtype == torch.bfloat16 and embedding.device.type == "cpu" and _Int8Product.is_served():
            self._coarse = _Int8Product(embedding)
        else:
            self._coarse = Linear.from_weights(embedding, None)
            self._coarse.pack()

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of ``hidden``."""
        logits = self._coarse(hidden).float()
        if hidden.dtype == torch.float32:
            return logits
        best = _largest(logits, min(REFINED, logits.shape[-1]))
        best = torch.cat([best, self._exact_ids.expand(*best.shape[:-1], -1)], dim=-1)
        products = F.embedding(best, self._embedding).float() @ hidden.float().unsqueeze(-1)
        return logits.scatter_(-1, best, products.squeeze(-1))


class _Int8Product:
    """``x W^T`` with the weight in int8, its rows scaled by their own maxima.

    The input has a few values far above all others, so it is given in two int8 rows, a coarse and a fine one: what is
    read of the weight is the same.
    """

    def __init__(self, weight: Tensor) -> None:
        wide = weight.float()
        self._scales = (wide.abs().amax(dim=1) / 127).clamp_min_(1e-12)
        whole = (wide / self._scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    @staticmethod
    def is_served() -> bool:
        """Whether this build of torch has the operators."""
        names = ("qlinear_prepack", "qlinear_pointwise")
        return hasattr(torch.ops, "onednn") and all(hasattr(torch.ops.onednn, name) for name in names)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scales = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min_(1e-12)
        scaled = rows / scales
        coarse = scaled.round()
        fine = (scaled - coarse).mul_(_FINER).round_()
        product = torch.ops.onednn.qlinear_pointwise(
            torch.cat([coarse, fine]).to(torch.int8),
            1.0,
            0,
            self._weight,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        high, low = cast(Tensor, product).view(2, len(rows), -1).unbind()
        logits: Tensor = high.add_(low, alpha=1 / _FINER).mul_(scales)
        return logits.view(*x.shape[:-1], -1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of each row ``(..., n)``, in any order.

    A value among them is in one of the ``count`` blocks with the largest maxima, so that few have to be sorted.
    """
    size = values.shape[-1]
    if size < 4 * _BLOCK * count:
        return values.topk(count, dim=-1, sorted=False).indices
    padded = F.pad(values, (0, -size % _BLOCK), value=-torch.inf)
    columns = padded.shape[-1] // _BLOCK
    blocks = padded.view(*values.shape[:-1], _BLOCK, columns)  # a block is a column: its maximum is taken lane by lane
    chosen = blocks.amax(dim=-2).topk(count, dim=-1, sorted=False).indices
    inside = blocks.gather(-1, chosen.unsqueeze(-2).expand(*chosen.shape[:-1], _BLOCK, count)).flatten(-2)
    place = inside.topk(count, dim=-1, sorted=False).indices
    return place // count * columns + chosen.gather(-1, place % count)
