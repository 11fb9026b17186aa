"""A row's features depend on that row's samples alone, and counts are exact."""

from __future__ import annotations

import pytest
import torch

from oasr_core.frontend import fbank
from oasr_core.frontend.fbank import FbankFrontend, MfccFrontend
from oasr_core.frontend.options import FeatureConfig

LENGTHS = [0, 1, 79, 80, 159, 160, 239, 240, 399, 400, 401, 559, 560, 561, 800, 1599, 1600, 4000, 16000, 16001]
SETTINGS = [{}, {"snip_edges": False}, {"lfr_m": 7, "lfr_n": 6}, {"snip_edges": False, "lfr_m": 4, "lfr_n": 3}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e4])
def test_neighbours_and_padding_change_nothing(speech_like, extract, settings, fill):
    frontend = FbankFrontend(FeatureConfig(**settings), 32768.0)
    waveforms = [speech_like(length, seed) for seed, length in enumerate(LENGTHS)]
    together = extract(frontend, *waveforms, fill=fill)
    backwards = extract(frontend, *waveforms[::-1], fill=fill)[::-1]
    for waveform, batched, reverse in zip(waveforms, together, backwards, strict=True):
        (alone,) = extract(frontend, waveform, fill=fill)
        assert alone.shape == batched.shape == (frontend.num_frames(len(waveform)), frontend.feature_dim)
        torch.testing.assert_close(batched, alone, rtol=0, atol=4e-6)
        torch.testing.assert_close(reverse, alone, rtol=0, atol=4e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_frame_counts(settings):
    options = FeatureConfig(**settings)
    frontend = FbankFrontend(options, 1.0)
    for samples in range(2000):
        raw = (samples + 80) // 160 if not options.snip_edges else max(0, (samples - 400) // 160 + 1)
        assert frontend.num_frames(samples) == (raw + options.lfr_n - 1) // options.lfr_n


def test_blocks_change_nothing(speech_like, extract, monkeypatch):
    frontend = FbankFrontend(FeatureConfig(snip_edges=False), 32768.0)
    waveforms = [speech_like(length, seed) for seed, length in enumerate((5000, 300, 0, 16000, 7))]
    whole = extract(frontend, *waveforms)
    sizes = []
    compute = FbankFrontend._compute

    def recorded(self, frames):
        sizes.append(len(frames))
        return compute(self, frames)

    monkeypatch.setattr(FbankFrontend, "_compute", recorded)
    monkeypatch.setattr(fbank, "_CPU_BLOCK", 7)
    in_sevens = extract(frontend, *waveforms)
    assert sum(sizes) == 31 + 2 + 100
    assert set(sizes[:-1]) == {7}
    for one, other in zip(whole, in_sevens, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-6)


def test_the_waveform_is_left_alone(speech_like):
    waveform = torch.from_numpy(speech_like(8000)).unsqueeze(0)
    before = waveform.clone()
    for settings in SETTINGS:
        FbankFrontend(FeatureConfig(**settings), 32768.0).extract(waveform, torch.tensor([8000]))
    assert torch.equal(waveform, before)


def test_stacking_repeats_the_edges():
    frames = torch.arange(5.0).unsqueeze(1)
    stacked = fbank._stack(frames, 7, 6)
    assert stacked.tolist() == [[0, 0, 0, 0, 1, 2, 3]]
    assert fbank._stack(torch.arange(8.0).unsqueeze(1), 7, 6).tolist() == [[0, 0, 0, 0, 1, 2, 3], [3, 4, 5, 6, 7, 7, 7]]
    assert fbank._stack(torch.arange(5.0).unsqueeze(1), 1, 2).tolist() == [[0], [2], [4]]
    assert fbank._stack(torch.empty(0, 3), 7, 6).shape == (0, 21)


@pytest.mark.parametrize(("cls", "dim"), [(FbankFrontend, 80), (MfccFrontend, 13)])
def test_an_empty_batch(cls, dim):
    features, frames = cls(FeatureConfig(), 1.0).extract(torch.empty(0, 0), torch.empty(0, dtype=torch.int64))
    assert features.shape == (0, 0, dim)
    assert frames.shape == (0,)
    assert frames.dtype == torch.int64


def test_declared_sizes():
    frontend = FbankFrontend(FeatureConfig(lfr_m=7, lfr_n=6), 32768.0)
    assert frontend.feature_dim == 560
    assert frontend.frame_seconds == pytest.approx(0.06)
    assert frontend.framing is None
    plain = MfccFrontend(FeatureConfig(sample_rate=8000), 1.0)
    assert plain.feature_dim == 13
    assert plain.sample_rate == 8000
    assert plain.frame_seconds == pytest.approx(0.01)
    assert (plain.framing.span, plain.framing.hop) == (200, 80)
