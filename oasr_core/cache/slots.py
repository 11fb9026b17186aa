"""Fixed-extent streaming state: one tensor per declared slot, addressed by stream row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oasr_core.models.base import Slot


class SlotCache:
    """Holds every :class:`Slot` of an encoder for ``max_streams`` rows (plus one scratch row)."""

    def __init__(self, specs: Sequence[Slot], max_streams: int, dtype: torch.dtype, device: torch.device) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._tensors: dict[str, Tensor] = {}
        for spec in specs:
            shape = (*spec.shape[: spec.slot_axis], max_streams + 1, *spec.shape[spec.slot_axis :])
            self._tensors[spec.name] = torch.full(shape, spec.init, dtype=spec.dtype or dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def reset(self, row: int) -> None:
        """Give a row its initial value."""
        for name, spec in self.specs.items():
            self._tensors[name].select(spec.slot_axis, row).fill_(spec.init)

    def read(self, name: str, rows: RowIndex, layer: int | None) -> Tensor:
        """The rows of a slot, batch first."""
        tensor, axis = self._place(name, layer)
        picked = tensor.narrow(axis, *rows.span) if rows.span is not None else tensor.index_select(axis, rows.index)
        return picked.movedim(axis, 0)

    def write(self, name: str, rows: RowIndex, value: Tensor, layer: int | None) -> None:
        """Replace the rows of a slot; ``value`` is batch first."""
        tensor, axis = self._place(name, layer)
        value = value.movedim(0, axis)
        if rows.span is not None:
            tensor.narrow(axis, *rows.span).copy_(value)
        else:
            tensor.index_copy_(axis, rows.index, value.to(tensor.dtype))

    def _place(self, name: str, layer: int | None) -> tuple[Tensor, int]:
        if name not in self._tensors:
            raise KeyError(f"slot {name!r} is not declared; declared: {', '.join(self._tensors) or 'none'}")
        axis = self.specs[name].slot_axis
        tensor = self._tensors[name]
        if layer is None:
            return tensor, axis
        if axis == 0:
            raise ValueError(f"slot {name!r} has its slot axis first: it cannot be read by layer")
        return tensor[layer], axis - 1


class RowIndex:
    """The rows of a cohort: as an index tensor and, where they are consecutive, as a span that needs no gather."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.rows = list(rows)
        consecutive = all(b == a + 1 for a, b in zip(self.rows, self.rows[1:], strict=False))
        self.span: tuple[int, int] | None = (self.rows[0], len(self.rows)) if consecutive else None
        self._device = device
        self._index: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """``(batch,)`` int64."""
        if self._index is None:
            self._index = torch.tensor(self.rows, dtype=torch.int64).to(self._device, non_blocking=True)
        return self._index
