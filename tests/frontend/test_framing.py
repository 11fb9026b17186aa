"""The frame grid: counts, starts and mirrored edges, against Kaldi's rules spelt out."""

from __future__ import annotations

import pytest
import torch

from oasr_core.frontend.framing import CentredFraming, SnipEdgesFraming, compute_in_blocks, cut_frames

GRIDS = [(400, 160), (200, 80), (9, 4), (10, 3), (7, 7), (5, 8), (6, 5), (2, 1), (11, 1)]


@pytest.mark.parametrize(("span", "hop"), GRIDS)
def test_snip_edges_counts_whole_windows(span, hop):
    framing = SnipEdgesFraming(span, hop)
    for samples in range(5 * (span + hop)):
        whole = sum(1 for start in range(0, samples, hop) if start + span <= samples)
        assert framing.frames(samples, final=True) == framing.frames(samples, final=False) == whole


@pytest.mark.parametrize(("span", "hop"), GRIDS)
def test_centred_counts(span, hop):
    framing = CentredFraming(span, hop)
    for samples in range(5 * (span + hop)):
        total = (samples + hop // 2) // hop
        assert framing.frames(samples, final=True) == total
        ready = framing.frames(samples, final=False)
        assert ready == sum(1 for t in range(total) if framing.start(t) + span <= samples)


@pytest.mark.parametrize(("span", "hop"), GRIDS)
def test_mirrored_edges(span, hop):
    framing = CentredFraming(span, hop)
    for total in range(1, 40):
        count = framing.frames(total, final=True)
        frames = cut_frames(torch.arange(total), framing, 0, count)
        assert frames.shape == (count, span)
        for t in range(count):
            for i in range(span):
                position = framing.start(t) + i
                while not 0 <= position < total:
                    position = -position - 1 if position < 0 else 2 * total - 1 - position
                assert frames[t, i] == position


@pytest.mark.parametrize("framing", [SnipEdgesFraming(400, 160), CentredFraming(400, 160)])
def test_part_of_an_utterance(framing):
    samples = torch.arange(3000)
    whole = cut_frames(samples, framing, 0, framing.frames(3000, final=True))
    for first in range(2, whole.shape[0]):
        base = framing.start(first)
        part = cut_frames(samples[base:], framing, first, whole.shape[0] - first, total=3000, base=base)
        assert torch.equal(part, whole[first:])


def test_whole_windows_are_a_view():
    samples = torch.arange(4000.0)
    frames = cut_frames(samples, SnipEdgesFraming(400, 160), 3, 5)
    assert frames.untyped_storage().data_ptr() == samples.untyped_storage().data_ptr()
    assert cut_frames(samples, SnipEdgesFraming(400, 160), 3, 0).shape == (0, 400)


@pytest.mark.parametrize("block", [1, 2, 3, 10, 100])
def test_blocks_cover_every_frame_once(block):
    rows = [torch.arange(n * 2.0).view(n, 2) for n in (3, 0, 1, 7, 2)]
    sizes = []

    def compute(frames):
        sizes.append(frames.shape[0])
        return frames.sum(1, keepdim=True)

    flat = compute_in_blocks(compute, rows, 1, device=torch.device("cpu"), block=block)
    assert torch.equal(flat, torch.cat(rows).sum(1, keepdim=True))
    assert all(size == block for size in sizes[:-1])
    assert sizes[-1] <= block
