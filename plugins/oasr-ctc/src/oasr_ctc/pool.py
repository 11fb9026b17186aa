"""The memory of prefix beam search: one pool for all streams, which grows and shrinks with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oasr_ctc.beams import EMISSION, PREFIX, empty_prefix
from oasr_ctc.emissions import mark, move

_SMALLEST_SLOTS = 8
_SMALLEST_EMISSIONS = 4096


class BeamPool:
    """Slots of streams, and the emissions that their beams refer to.

    ``beams`` ``(slots, beam)`` of ``PREFIX``, best first; ``sizes`` prefixes in use and ``frames`` seen by each slot;
    ``emissions`` of ``EMISSION``, filled up to ``used``; ``roots`` the last emission of each slot that can change no
    more (-1: none) and ``settled`` the number of tokens up to it.
    """

    def __init__(self, beam_size: int) -> None:
        self._beam_size = beam_size
        self._empty = empty_prefix()
        self._reset()

    def _reset(self) -> None:
        self.beams = np.empty((0, self._beam_size), PREFIX)
        self.sizes = np.empty(0, np.int32)
        self.frames = np.empty(0, np.int64)
        self.roots = np.empty(0, np.int64)
        self.settled = np.empty(0, np.int64)
        self.emissions = np.empty(_SMALLEST_EMISSIONS, EMISSION)
        self.used = 0
        self._open: set[int] = set()
        self._free: list[int] = []

    @property
    def num_open(self) -> int:
        """Streams that hold a slot."""
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self.beams, self.sizes, self.frames, self.roots, self.settled, self.emissions)
        return sum(array.nbytes for array in arrays)

    def open(self) -> int:
        """Take a slot for a stream that has said nothing."""
        if not self._free:
            self._grow_slots()
        slot = self._free.pop()
        self._open.add(slot)
        self.beams[slot, 0] = self._empty
        self.sizes[slot], self.frames[slot], self.roots[slot], self.settled[slot] = 1, 0, -1, 0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back; with the last one all memory is given back."""
        self._open.remove(slot)
        self._free.append(slot)
        if not self._open:
            self._reset()

    def make_room(self, emissions: int) -> None:
        """Drop emissions that no stream needs; make room for ``emissions`` more, and for as many again as are left."""
        slots = np.array(sorted(self._open), dtype=np.int64)
        places = mark(slots, self.beams, self.sizes, self.emissions, self.used, self.roots)
        kept = int(places.max(initial=-1)) + 1
        target = np.empty(max(_SMALLEST_EMISSIONS, 2 * kept + emissions), EMISSION)
        move(slots, self.beams, self.sizes, self.emissions, places, self.roots, target)
        self.emissions, self.used = target, kept

    def _grow_slots(self) -> None:
        old, new = len(self.sizes), max(_SMALLEST_SLOTS, 2 * len(self.sizes))
        for name in ("beams", "sizes", "frames", "roots", "settled"):
            array: npt.NDArray[np.generic] = getattr(self, name)
            grown = np.zeros((new, *array.shape[1:]), array.dtype)
            grown[:old] = array
            setattr(self, name, grown)
        self._free = list(range(new - 1, old - 1, -1))
