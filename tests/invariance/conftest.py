"""Real speech on the trained digits checkpoint."""

from __future__ import annotations

import pytest
import torch

from oasr_core.audio import load_audio


@pytest.fixture(scope="session")
def clips(wenet_digits) -> list[torch.Tensor]:
    """Eight recordings of 0.9 s to 12.1 s, in no order of length, and one of less than a window."""
    names = ["utt07_3d", "utt01_1d", "utt18_17d", "utt04_2d", "utt16_7d", "utt03_2d", "utt09_4d", "utt12_5d"]
    waveforms = [load_audio(wenet_digits / "test_wavs" / f"{name}.wav").samples for name in names]
    waveforms = [torch.from_numpy(waveform) for waveform in waveforms]
    return [*waveforms, waveforms[0][:5000]]
