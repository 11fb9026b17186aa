"""Short-time energy, and the quietest point of a stretch of audio."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

#: Seconds that one energy spans, and seconds from one to the next.
FRAME_SECONDS, HOP_SECONDS = 0.025, 0.010
#: Frames over which the logarithm is averaged: a pause between words is longer, the closure of a plosive shorter.
SMOOTHING_FRAMES = 21
#: Mean square (-100 dB of full scale) below which nothing is quieter than anything else.
FLOOR = 1e-10


def quietest(waveform: Tensor, begin: int, end: int, sample_rate: int) -> int:
    """The sample in ``begin < sample <= end`` around which ``waveform`` ``(samples,)`` is quietest.

    Quiet is the logarithm of the energy in frames of 25 ms, averaged over 0.2 s. Of equally quiet points the middle
    one of the longest run counts.
    """
    hop = max(round(HOP_SECONDS * sample_rate), 1)
    span = max(round(FRAME_SECONDS * sample_rate), hop)
    reach = span // 2 + hop * (SMOOTHING_FRAMES // 2)
    low, high = max(begin - reach, 0), min(end + reach, int(waveform.shape[0]))
    stretch = waveform[low:high].float()
    if stretch.shape[0] < span:
        return (begin + 1 + end) // 2
    power = avg_pool1d(stretch.square()[None], span, hop)
    logs = power.clamp_min(FLOOR).log()
    smooth = avg_pool1d(logs, SMOOTHING_FRAMES, 1, SMOOTHING_FRAMES // 2, count_include_pad=False)[0]
    centres = low + span // 2 + hop * torch.arange(smooth.shape[0])
    inside = (centres > begin) & (centres <= end)
    if not bool(inside.any()):
        return (begin + 1 + end) // 2
    return _middle_of_longest_run(centres[inside], smooth[inside], hop)


def _middle_of_longest_run(centres: Tensor, levels: Tensor, hop: int) -> int:
    quiet = centres[levels <= levels.min() + 1e-3].tolist()
    best = run = quiet[:1]
    for centre in quiet[1:]:
        run = [*run, centre] if centre - run[-1] == hop else [centre]
        best = max(best, run, key=len)
    return int(best[len(best) // 2])
