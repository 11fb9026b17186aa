"""The free list of the paged KV pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from oasr_core.errors import CachePoolExhausted


class BlockPool:
    """Hands out block ids.

    A caller may name the block it would like best (its *home*), which keeps a stream's history contiguous in memory
    so that the CPU can attend over it in place; where that block is taken, the lowest free one is given. ``scratch``
    blocks past the end of the pool are never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = dict.fromkeys(range(num_blocks))
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Blocks that can still be handed out."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether ``count`` blocks are free."""
        return len(self._free) >= count

    def allocate(self, preferred: Sequence[int]) -> list[int]:
        """One block per entry of ``preferred`` (home block ids, or -1), all or none.

        Raises :class:`CachePoolExhausted` when fewer are free.
        """
        with self._lock:
            if len(preferred) > len(self._free):
                raise CachePoolExhausted(
                    f"KV block pool: {len(preferred)} blocks wanted, {len(self._free)} of "
                    f"{self.num_blocks} free. Raise "
                    "max_num_blocks, lower max_batch_size, or set num_left_chunks to bound each stream."
                )
            given: list[int] = []
            for want in preferred:
                block = want if want in self._free else next(iter(self._free))
                del self._free[block]
                given.append(block)
            return given

    def free(self, blocks: Sequence[int]) -> None:
        """Return blocks; a block that is not out raises ``ValueError``."""
        with self._lock:
            for block in blocks:
                if block in self._free or not 0 <= block < self.num_blocks:
                    raise ValueError(f"block {block} is not allocated (pool of {self.num_blocks})")
                self._free[block] = None
