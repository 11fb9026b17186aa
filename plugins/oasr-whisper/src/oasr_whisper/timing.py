"""When tokens were said: the path of least cost through their attention to the audio (dynamic time warping)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Width of the median filter along the frames.
_MEDIAN_WIDTH = 7

#: Pairs to put in order, one after the other, until the fourth of seven values is their median.
_MEDIAN_NETWORK = (
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)

Costs = npt.NDArray[np.float64]


def token_frames(scores: Tensor, first: int, count: int, frames: int) -> list[int]:
    """The frame in which each of ``count`` tokens begins.

    ``scores`` ``(heads, n, all frames)`` are those of the alignment heads before softmax, over a start sequence, a text
    and the end token. Row ``first`` is the one that predicts the first of the tokens; they are the text's and the end,
    whose frame is the first one behind the text. Only the first ``frames`` frames hold audio. The steps are those of
    OpenAI's ``timing.py``, as CTranslate2 takes them.
    """
    if frames < 1:
        return [0] * count
    total: Tensor | None = None
    for head in scores:  # one at a time stays in a processor's cache
        weights = head[:, :frames].float().softmax(dim=-1)
        centred = weights - weights.mean(dim=0)
        deviation = centred.square().mean(dim=0).sqrt_().clamp_min_(torch.finfo(torch.float32).tiny)
        filtered = median_filtered(centred[first : first + count] / deviation)
        total = filtered if total is None else total + filtered
    if total is None:
        raise ValueError("token_frames needs the scores of at least one head")
    return first_frames((total / -len(scores)).double().cpu().numpy())


def median_filtered(values: Tensor) -> Tensor:
    """The median of each 7 neighbours on the last axis; the edges are mirrored without being repeated.

    An axis that is too short to be mirrored stays as it is.
    """
    reach = _MEDIAN_WIDTH // 2
    frames = values.shape[-1]
    if frames <= reach:
        return values
    padded = torch.nn.functional.pad(values.reshape(1, -1, frames), (reach, reach), mode="reflect")
    ranked = [padded[..., shift : shift + frames].clone() for shift in range(_MEDIAN_WIDTH)]
    spare = torch.empty_like(ranked[0])
    for low, high in _MEDIAN_NETWORK:
        torch.minimum(ranked[low], ranked[high], out=spare)
        torch.maximum(ranked[low], ranked[high], out=ranked[high])
        ranked[low], spare = spare, ranked[low]
    return ranked[reach].view(values.shape)


def first_frames(costs: Costs) -> list[int]:
    """The first column of each row on the cheapest path through ``(tokens, frames)`` costs.

    The path leads from corner to corner and steps to the next row, the next column or both; of equal ways it takes the
    next column.
    """
    totals = _totals(costs)
    row, column = totals.shape[0] - 1, totals.shape[1] - 1
    found = [0] * (row + 1)
    while row > 0:
        if column == 0:
            found[row] = 0
            row -= 1
            continue
        both, down, right = totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]
        if right <= both and right <= down:
            column -= 1
            continue
        found[row] = column
        row -= 1
        column -= 1 if both <= down else 0
    return found


def _totals(costs: Costs) -> Costs:
    """The cost of the cheapest path to each cell.

    In a row, ``total[j] = cost[j] + min(above[j], total[j - 1])`` with ``above`` the better of the two cells before it;
    subtracting the running sum of the costs turns the recurrence into a running minimum.
    """
    totals = np.empty_like(costs)
    totals[0] = np.cumsum(costs[0])
    for row in range(1, len(costs)):
        previous = totals[row - 1]
        above = previous.copy()
        np.minimum(above[1:], previous[:-1], out=above[1:])
        sums = np.cumsum(costs[row])
        above -= sums
        above += costs[row]
        totals[row] = np.minimum.accumulate(above) + sums
    return totals
