"""Settings that are refused, and the way in through the registry's entry points."""

from __future__ import annotations

import pytest
import torch
from pydantic import BaseModel

from oasr_core.errors import ConfigError
from oasr_core.frontend.fbank import FbankFrontend, MfccFrontend
from oasr_core.frontend.options import FeatureConfig
from oasr_core.registry import registry


@pytest.mark.parametrize(("name", "cls"), [("fbank", FbankFrontend), ("mfcc", MfccFrontend)])
def test_registered(name, cls):
    assert registry("frontends").get(name) is cls


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (FbankFrontend, {"num_mel_bin": 80}, "Did you mean 'num_mel_bins'"),
        (FbankFrontend, {"sample_rate": 0}, "sample_rate=0"),
        (FbankFrontend, {"window_type": "kaiser"}, "window_type='kaiser'"),
        (FbankFrontend, {"frame_length_ms": float("inf")}, "frame_length_ms"),
        (FbankFrontend, {"dither": float("nan")}, "dither"),
        (FbankFrontend, {"high_freq": 8001.0}, "8001"),
        (FbankFrontend, {"high_freq": -7990.0}, "10.0 Hz"),
        (FbankFrontend, {"low_freq": -1.0}, "low_freq=-1"),
        (FbankFrontend, {"low_freq": 9000.0}, "low_freq=9000"),
        (FbankFrontend, {"frame_length_ms": 0.1}, "frame_length_ms=0.1"),
        (FbankFrontend, {"frame_shift_ms": 0.01}, "frame_shift_ms=0.01"),
        (FbankFrontend, {"sample_rate": 11025, "round_to_power_of_two": False}, "odd FFT"),
        (MfccFrontend, {"num_ceps": 24, "num_mel_bins": 23}, "num_ceps=24"),
        (MfccFrontend, {"use_power": False}, "use_power"),
        (MfccFrontend, {"use_log_fbank": False}, "use_log_fbank"),
    ],
)
def test_refused(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls.from_options(options, 1.0).to(torch.device("cpu"))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_the_scale_is_positive(scale):
    with pytest.raises(ConfigError, match="audio_scale"):
        FbankFrontend(FeatureConfig(), scale)


def test_other_options_are_refused():
    class Other(BaseModel):
        pass

    with pytest.raises(ConfigError, match="Other"):
        FbankFrontend(Other(), 1.0)


def test_two_problems_are_told_together():
    with pytest.raises(ConfigError, match=r"sample_rate=-1.*foo: no such option"):
        FbankFrontend.from_options({"sample_rate": -1, "foo": 1}, 1.0)
