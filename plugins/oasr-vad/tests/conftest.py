"""Recordings of digits, and a detector."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_vad.options import VadOptions
from oasr_vad.segmenter import VadSegmenter


@pytest.fixture(scope="session")
def digits(wenet_digits: Path) -> dict[str, torch.Tensor]:
    """Recordings at 16 kHz, by name."""
    paths = sorted((wenet_digits / "test_wavs").glob("*.wav"))
    assert len(paths) >= 10
    return {path.stem: torch.from_numpy(load_audio(path, sample_rate=16000).samples.copy()) for path in paths}


@pytest.fixture(scope="session")
def conversation(digits) -> torch.Tensor:
    """Recordings one after another, a second of silence before each."""
    pause = torch.zeros(16000)
    return torch.cat([part for clip in digits.values() for part in (pause, clip)])


@pytest.fixture(scope="session")
def vad() -> VadSegmenter:
    return VadSegmenter(VadOptions(), 16000)
