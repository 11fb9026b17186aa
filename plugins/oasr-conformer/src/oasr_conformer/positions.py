"""Position tables that grow with the longest input seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from oasr_core.errors import AudioTooLongError
from oasr_core.models.layers import sinusoids

if TYPE_CHECKING:
    from oasr_conformer.attention import SelfAttention

#: Rows of WeNet's position table: longer input is refused there as well.
MAX_POSITIONS = 5000

_FIRST_ROWS = 512


class PositionTables(nn.Module):
    """Sinusoids and what the layers derive from them, for positions ``0 .. size - 1``."""

    def __init__(self, dim: int, *, scale_input: bool, add_to_input: bool, limit: int | None) -> None:
        super().__init__()
        self.dim = dim
        self.size = 0
        self.limit = limit
        self._scale_input = scale_input
        self._add_to_input = add_to_input
        self._absolute: Tensor | None = None

    def reserve(self, positions: int, rows: int, layers: Sequence[SelfAttention]) -> None:
        """Make the tables cover ``rows`` rows, of which ``positions`` are real and the rest padding.

        Raises ``AudioTooLongError`` for positions beyond the trained limit.
        """
        if self.limit is None:
            return
        if positions > self.limit:
            raise AudioTooLongError(
                f"conformer: {positions} encoder frames in one utterance or stream; the model has positions for "
                f"{self.limit}. Cut the audio into shorter pieces."
            )
        if rows <= self.size:
            return
        self.size = max(rows, min(2 * self.size, self.limit), _FIRST_ROWS)
        weight = layers[0].linear_out.bias
        table = sinusoids(self.size, self.dim, device=weight.device)
        if self._add_to_input:
            self._absolute = table.to(weight.dtype)
        for layer in layers:
            layer.set_positions(table)

    def embed(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """The encoder's input from the subsampled frames ``x`` ``(batch, frames, dim)``, in place."""
        if self._scale_input:
            x = x.mul_(self.dim**0.5)
        if self._absolute is not None:
            x = x.add_(self._absolute[positions])
        return x
