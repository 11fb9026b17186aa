"""Best-path arithmetic: the best label of each frame, and the runs of equal labels that are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_core.errors import OasrError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class InvalidLogProbsError(OasrError, ValueError):
    """Frame posteriors that are no posteriors (NaN or positive infinity); ``rows`` are the batch rows at fault."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)

    @classmethod
    def of(cls, rows: Sequence[int], frame: int) -> InvalidLogProbsError:
        """The error of ``rows``, the first of which is at fault from ``frame`` on."""
        return cls(
            f"CTC log posteriors of batch row(s) {list(rows)} are NaN or +inf, first in frame {frame} of row {rows[0]};"
            " finite values or -inf are allowed. The encoder overflowed or its weights are not finite: check the "
            "checkpoint, or run it with dtype='float32'.",
            rows,
        )


class BestPath(NamedTuple):
    """The best label of each frame, on the host; entries past a row's length are garbage.

    ``labels`` ``(batch, frames)``; ``log_probs`` the log posterior of each of them; ``previous_log_probs`` the log
    posterior, in the same frame, of the label of the frame before; ``lengths`` ``(batch,)`` frames.
    """

    labels: Ints
    log_probs: Floats
    previous_log_probs: Floats
    lengths: Ints


class Runs(NamedTuple):
    """The tokens of a chunk, row after row, and each row's totals.

    ``tokens``, ``frames`` (of the chunk) and ``log_probs`` are flat lists; row ``i`` owns ``bounds[i]:bounds[i + 1]``.
    ``scores`` are summed log posteriors; ``last_labels`` and ``last_spoken`` (-1: none) are the label of each row's
    last frame and its last frame that is not blank.
    """

    tokens: list[int]
    frames: list[int]
    log_probs: list[float]
    bounds: list[int]
    scores: list[float]
    last_labels: list[int]
    last_spoken: list[int]


def best_path(log_probs: Tensor, lengths: Tensor, carried: Sequence[int]) -> BestPath:
    """Find the best label of every frame of ``log_probs`` ``(batch, frames, vocab)``; the lowest id wins a tie.

    ``lengths`` ``(batch,)`` frames; ``carried`` the label of the frame before the first one of each row. NaN is passed
    on: a frame that holds one has a NaN log posterior.
    """
    log_probs = log_probs.detach().float()
    if log_probs.device.type == "cpu":
        return _best_path_host(log_probs.numpy(), lengths.numpy(), np.asarray(carried, dtype=np.int64))
    return _best_path_device(log_probs, lengths, torch.tensor(carried, dtype=torch.int64, device=log_probs.device))


def _best_path_host(scores: Floats, lengths: Ints, carried: Ints) -> BestPath:
    # numpy's argmax promises the first maximum and the first NaN, and is several times faster than torch's on the CPU.
    labels = scores.argmax(axis=2)
    previous = np.concatenate([carried[:, None], labels], axis=1)[:, :-1]
    return BestPath(labels, _pick(scores, labels), _pick(scores, previous), lengths)


def _pick(scores: Floats, labels: Ints) -> Floats:
    picked: Floats = np.take_along_axis(scores, labels[:, :, None], axis=2)[:, :, 0]
    return picked


def _best_path_device(log_probs: Tensor, lengths: Tensor, carried: Tensor) -> BestPath:
    # torch.max along a dimension promises the first maximum and passes NaN on, on every device.
    best, labels = log_probs.max(dim=2)
    batch, frames = labels.shape
    previous = torch.cat([carried[:, None], labels], dim=1)[:, :-1]
    again = log_probs.gather(2, previous[:, :, None])[:, :, 0]
    parts = (labels.int(), best.view(torch.int32), again.view(torch.int32), lengths.to(labels.device).int())
    packed = torch.cat([part.flatten() for part in parts]).cpu().numpy()  # one copy: floats travel as their bits
    grid = packed[: 3 * batch * frames].reshape(3, batch, frames)
    host_lengths = packed[grid.size :].astype(np.int64)
    return BestPath(grid[0].astype(np.int64), grid[1].view(np.float32), grid[2].view(np.float32), host_lengths)


def find_runs(path: BestPath, carried: Sequence[int], blank_id: int) -> Runs:
    """Collapse repeats and drop blanks; ``carried`` as in :func:`best_path`, so a run that goes on is no new token.

    A token's log posterior is the larger of its posteriors in the first frame of its run and in the frame after (where
    the chunk has one). A frame in which every label has log posterior -inf counts as blank and adds nothing to the
    score. Raises :class:`InvalidLogProbsError` for NaN and positive infinity.
    """
    batch, frame_count = path.labels.shape
    grid = np.arange(frame_count)
    valid = grid < path.lengths[:, None]
    finite = np.isfinite(path.log_probs)
    _refuse_invalid(valid & ~finite & (path.log_probs != -np.inf))
    labels = np.where(valid & finite, path.labels, blank_id)
    with_carried = np.concatenate([np.asarray(carried, dtype=np.int64)[:, None], labels], axis=1)
    spoken = labels != blank_id
    rows, frames = np.nonzero(spoken & (labels != with_carried[:, :-1]))
    own = path.log_probs[rows, frames]
    after = path.previous_log_probs[rows, np.minimum(frames + 1, frame_count - 1)]
    followed = frames + 1 < path.lengths[rows]
    return Runs(
        tokens=labels[rows, frames].tolist(),
        frames=frames.tolist(),
        log_probs=np.where(followed, np.maximum(own, after), own).tolist(),
        bounds=np.searchsorted(rows, np.arange(batch + 1)).tolist(),
        scores=np.where(valid & finite, path.log_probs, 0.0).sum(axis=1, dtype=np.float64).tolist(),
        last_labels=with_carried[np.arange(batch), path.lengths].tolist(),
        last_spoken=np.where(spoken, grid, -1).max(axis=1, initial=-1).tolist(),
    )


def _refuse_invalid(broken: npt.NDArray[np.bool_]) -> None:
    if not broken.any():
        return
    rows = np.flatnonzero(broken.any(axis=1)).tolist()
    raise InvalidLogProbsError.of(rows, int(broken[rows[0]].argmax()))
