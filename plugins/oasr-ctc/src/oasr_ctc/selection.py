"""The most probable labels of every frame, found in one pass over the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oasr_core.compiled import compiled

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

#: In place of a frame's count of labels: its blank posterior reaches the threshold, nothing else is considered.
SKIPPED = -1

_BLOCK = 64
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LOWEST = np.int32(-0x80000000)
# Order keys of -inf and +inf; NaN lies beyond them.
_MINUS_INF = np.int32(-0x7F800001)
_PLUS_INF = np.int32(0x7F800000)


@compiled
def select_labels(
    log_probs: Floats, lengths: npt.NDArray[np.int64], blank: int, threshold: float, labels: Ints, counts: Ints
) -> Ints:
    """Find the best labels of each frame of ``log_probs`` ``(batch, frames, vocab)``, the lower id first in a tie.

    ``lengths`` ``(batch,)`` frames; what lies beyond is not read. ``labels`` ``(batch, frames, width)`` receives the
    ids, best first, ``counts`` ``(batch, frames)`` how many there are: labels with log posterior -inf are left out, and
    frames whose blank has a log posterior of at least ``threshold`` get ``SKIPPED``. Returns ``(batch,)`` the first
    frame that holds NaN or +inf, -1 where none does.
    """
    # Floats are compared as integers: maxima of blocks are vector instructions, and NaN shows at the ends of the order.
    bits = log_probs.view(np.int32)
    batch, _, vocab = bits.shape
    width = labels.shape[2]
    blocks = (vocab + _BLOCK - 1) // _BLOCK
    maxima = np.empty(blocks, np.int32)
    best = np.empty(width, np.int32)
    invalid = np.full(batch, -1, np.int32)
    for row in range(batch):
        for frame in range(lengths[row]):
            keys = bits[row, frame]
            lowest, highest = _PLUS_INF, _LOWEST
            for block in range(vocab // _BLOCK):  # a fixed number of labels, which becomes vector instructions
                maximum, start = _LOWEST, block * _BLOCK
                for offset in range(_BLOCK):
                    key = _key(keys[start + offset])
                    maximum = max(maximum, key)
                    lowest = min(lowest, key)
                maxima[block] = maximum
                highest = max(highest, maximum)
            for label in range(vocab - vocab % _BLOCK, vocab):
                key = _key(keys[label])
                maxima[blocks - 1] = key if label % _BLOCK == 0 else max(maxima[blocks - 1], key)
                lowest, highest = min(lowest, key), max(highest, key)
            if lowest < _MINUS_INF or highest >= _PLUS_INF:
                if invalid[row] < 0:
                    invalid[row] = frame
                continue
            if highest > _MINUS_INF and log_probs[row, frame, blank] >= threshold:
                counts[row, frame] = SKIPPED
                continue
            floor = _floor(maxima, best)
            found = 0
            for block in range(blocks):
                if maxima[block] < floor:
                    continue
                for label in range(block * _BLOCK, min(vocab, (block + 1) * _BLOCK)):
                    key = _key(keys[label])
                    if key < floor or key == _MINUS_INF or (found == width and key <= best[width - 1]):
                        continue
                    place = found if found < width else width - 1
                    while place > 0 and best[place - 1] < key:
                        best[place] = best[place - 1]
                        labels[row, frame, place] = labels[row, frame, place - 1]
                        place -= 1
                    best[place] = key
                    labels[row, frame, place] = label
                    found = min(found + 1, width)
            counts[row, frame] = found
    return invalid


@compiled
def _key(bits: np.int32) -> np.int32:
    """The bits of a float as an integer that orders like the float."""
    return np.int32(bits ^ np.int32((bits >> _SIGN) & _MAGNITUDE))


@compiled
def _floor(maxima: Ints, best: Ints) -> np.int32:
    """A key that at least ``len(best)`` labels reach: the ``len(best)``-th largest of the blocks' maxima."""
    width = len(best)
    if len(maxima) < width:
        return _LOWEST
    found = 0
    for maximum in maxima:
        if found == width and maximum <= best[width - 1]:
            continue
        place = found if found < width else width - 1
        while place > 0 and best[place - 1] < maximum:
            best[place] = best[place - 1]
            place -= 1
        best[place] = maximum
        found = min(found + 1, width)
    return np.int32(best[width - 1])
