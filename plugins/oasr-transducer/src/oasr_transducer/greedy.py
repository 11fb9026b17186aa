"""Greedy walks: the best label at each point of many utterances at once, each at its own frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_transducer.errors import InvalidLogitsError
from oasr_transducer.joint import Joint
from oasr_transducer.prediction import Prediction, Predictor, reads_are_free

#: The most frames of a row whose joint outputs are computed in one go; those behind a token are computed again.
_WINDOW = 8
#: Frames of all rows together, on the CPU: up to here a larger matrix costs hardly more than one of a single row.
_JOINT_ROWS = 16
#: Steps between two looks of the host at who is done (devices).
_STEPS = 8

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Walked(NamedTuple):
    """What a chunk gave, on the host.

    ``tokens``, ``frames`` (of the chunk) and ``log_probs`` are flat lists; row ``i`` owns ``bounds[i]:bounds[i + 1]``.
    ``scores`` are the log posteriors of each row's path; ``skips`` the frames of the next chunk that are jumped over.
    """

    tokens: list[int]
    frames: list[int]
    log_probs: list[float]
    bounds: list[int]
    scores: list[float]
    skips: list[int]


class _Points(NamedTuple):
    """Where each row is: its frame, and the tokens that this frame emitted so far; and its path's log posterior."""

    frame: Tensor
    symbols: Tensor
    score: Tensor


class _Seen(NamedTuple):
    """Of each row: the frames passed in silence, whether a token follows in the window, and which; its log posterior,
    that of all of this, and the log posteriors ``(rows, durations)`` of the durations.
    """

    passed: Tensor
    spoke: Tensor
    token: Tensor
    log_prob: Tensor
    gained: Tensor
    durations: Tensor | None


class _Emissions(NamedTuple):
    """What rows did in one step; ``token`` is -1 where nothing was said."""

    row: Tensor
    token: Tensor
    frame: Tensor
    log_prob: Tensor


class GreedyWalk:
    """Label looping: rows wait for each other at tokens, not at frames.

    In each step every unfinished row passes the frames in which the best label is silent, up to the window's end or to
    the next token; then the predictor runs for those that speak. Rows are independent of each other. A silent label
    wins a tie. On a device the host looks at the rows every few steps, not at each.
    """

    def __init__(self, joint: Joint, predictor: Predictor, max_sym_per_frame: int) -> None:
        self._joint = joint
        self._predictor = predictor
        self._max_sym_per_frame = max_sym_per_frame

    def walk(
        self, before: Prediction, hidden: Tensor, frames: Sequence[int], skips: Sequence[int]
    ) -> tuple[Walked, Prediction]:
        """Walk over ``frames[row]`` frames of each row of ``hidden`` ``(batch, frames, dim)``, from ``skips[row]`` on.

        Raises :class:`InvalidLogitsError`.
        """
        device = hidden.device
        lengths = torch.tensor(frames, device=device)
        encoder = self._joint.project(hidden)
        points = _Points(
            torch.tensor(skips, device=device),
            torch.zeros(len(skips), dtype=torch.int64, device=device),
            torch.zeros(len(skips), dtype=torch.float64, device=device),
        )
        emissions: list[_Emissions] = []
        prediction = before
        while len(rows := (points.frame < lengths).nonzero()[:, 0]):
            for _ in range(1 if reads_are_free(device) else _STEPS):
                emitted, prediction = self._step(points, prediction, encoder, lengths, rows)
                emissions.append(emitted)
        return _collect(emissions, points, lengths), prediction

    def _window(self, rows: int, device: torch.device) -> int:
        if self._joint.durations is not None:
            return 1
        return min(_WINDOW, max(1, _JOINT_ROWS // rows)) if reads_are_free(device) else _WINDOW

    def _step(
        self, points: _Points, prediction: Prediction, encoder: Tensor, lengths: Tensor, rows: Tensor
    ) -> tuple[_Emissions, Prediction]:
        """Move ``rows`` on, in place, to their next token or to the window's end."""
        seen = self._look(points.frame[rows], prediction.out[rows], encoder, lengths[rows], rows)
        symbols = torch.where(seen.passed > 0, 0, points.symbols[rows]) + seen.spoke.long()
        beyond = seen.spoke & (symbols >= self._max_sym_per_frame)
        jump = beyond.long() if seen.durations is None else self._jump(seen.durations, seen.spoke, beyond)
        frame = points.frame[rows] + seen.passed
        points.frame[rows] = torch.where(seen.passed.bool() | seen.spoke, frame + jump, frame)
        points.symbols[rows] = torch.where(jump > 0, 0, symbols)
        points.score[rows] += seen.gained
        tokens, speaks = torch.zeros_like(points.frame), torch.zeros_like(points.frame, dtype=torch.bool)
        tokens[rows], speaks[rows] = seen.token, seen.spoke
        everyone = torch.arange(len(tokens), device=tokens.device)
        after = self._predictor.follow(prediction, everyone, tokens, speaks)
        return _Emissions(rows, torch.where(seen.spoke, seen.token, -1), frame, seen.log_prob), after

    def _look(self, begin: Tensor, out: Tensor, encoder: Tensor, ends: Tensor, rows: Tensor) -> _Seen:
        """What the joint network says of the window from frame ``begin`` of each row."""
        window = self._window(len(rows), encoder.device)
        ahead = begin[:, None] + torch.arange(window, device=encoder.device)
        within = ahead < ends[:, None]
        frames = encoder[rows[:, None], torch.minimum(ahead, ends[:, None] - 1)]
        logits, durations = self._joint.logits(frames, out[:, None])
        posteriors = logits.log_softmax(dim=2)
        best, labels = posteriors.max(dim=2)
        silent = posteriors.index_select(2, self._joint.constants(encoder.device).silent).amax(dim=2)
        speaks = within & (best > silent)
        counted = within & (speaks.cumsum(dim=1) - speaks.long() == 0)  # up to the first that speaks, and that one
        spoke = speaks.any(dim=1)
        passed = counted.sum(dim=1) - spoke.long()
        place = passed.clamp(max=window - 1)[:, None]
        gained = torch.where(counted, best, 0.0).double().sum(dim=1)
        if durations is not None:  # one frame at a time
            durations = durations[:, 0].log_softmax(dim=1)
            gained += torch.where(within[:, 0], durations.amax(dim=1), 0.0)
        return _Seen(passed, spoke, labels.gather(1, place)[:, 0], best.gather(1, place)[:, 0], gained, durations)

    def _jump(self, log_probs: Tensor, spoke: Tensor, beyond: Tensor) -> Tensor:
        """Frames that the best durations add to the frame passed in silence or to that of the token."""
        chosen = log_probs.argmax(dim=1)
        durations = self._joint.constants(chosen.device).durations
        duration = torch.zeros_like(chosen) if durations is None else durations[chosen]
        return torch.where(spoke, torch.where(duration > 0, duration, beyond.long()), (duration - 1).clamp(min=0))


def _collect(emissions: list[_Emissions], points: _Points, lengths: Tensor) -> Walked:
    """Bring it all to the host, in one copy from a device."""
    batch = len(lengths)
    totals = (points.frame - lengths, points.score.view(torch.int64))
    if emissions:
        fields = [torch.cat(parts) for parts in zip(*emissions, strict=True)]
        fields[3] = fields[3].float().contiguous().view(torch.int32).long()
    else:
        fields = [points.frame[:0]] * 4
    packed = torch.cat([*fields, *totals]).cpu().numpy()
    rows, tokens, frames, bits = packed[: len(packed) - 2 * batch].reshape(4, -1)
    skips, scores = packed[len(packed) - 2 * batch :].reshape(2, batch)
    scores = scores.view(np.float64)
    if np.isnan(scores).any():
        raise InvalidLogitsError.of(np.flatnonzero(np.isnan(scores)).tolist())
    said = np.flatnonzero(tokens >= 0)
    said = said[np.argsort(rows[said], kind="stable")]
    return Walked(
        tokens=tokens[said].tolist(),
        frames=frames[said].tolist(),
        log_probs=bits[said].astype(np.int32).view(np.float32).tolist(),
        bounds=np.searchsorted(rows[said], np.arange(batch + 1)).tolist(),
        scores=scores.tolist(),
        skips=np.maximum(skips, 0).tolist(),
    )
