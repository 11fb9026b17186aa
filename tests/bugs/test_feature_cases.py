"""Features: faults that users of other engines reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oasr_core.frontend.fbank import FbankFrontend
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.options import FeatureConfig


def reference(samples, rate, bins):
    """Kaldi's filter bank in float64 with 25 ms Povey windows every 10 ms from 20 Hz to Nyquist."""
    span, hop = rate // 40, rate // 100
    size = 1 << (span - 1).bit_length()
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(span) / (span - 1))) ** 0.85
    mel = 1127 * np.log(1 + np.arange(size // 2) * rate / size / 700)
    low, high = 1127 * math.log(1 + 20 / 700), 1127 * math.log(1 + rate / 2 / 700)
    edges = low + (high - low) / (bins + 1) * np.arange(bins + 2)
    bank = np.array([np.interp(mel, edges[m : m + 3], [0, 1, 0]) for m in range(bins)])
    rows = []
    for start in range(0, len(samples) - span + 1, hop):
        frame = samples[start : start + span].astype(np.float64) * 32768
        frame -= frame.mean()
        frame = window * (frame - 0.97 * np.concatenate([frame[:1], frame[:-1]]))
        power = np.abs(np.fft.rfft(frame, size))[: size // 2] ** 2
        rows.append(np.log(np.maximum(bank @ power, np.finfo(np.float32).eps)))
    return np.array(rows)


# Narrow bins of loud noise carry more of float32's rounding.
@pytest.mark.parametrize(("rate", "bins", "tolerance"), [(8000, 40, 1e-4), (16000, 80, 2e-4)])
def test_one_front_end_for_training_batch_and_stream(rate, bins, tolerance):
    """wenet-e2e/wenet#320, #519: the runtime's second front end, or its default rate, cost 8 to 11 % absolute."""
    processor = InputProcessor(FbankFrontend.from_options({"sample_rate": rate, "num_mel_bins": bins}, 32768.0))
    samples = processor.prepare_waveform(np.random.default_rng(0).uniform(-0.5, 0.5, rate * 2 + 77))
    batch, (frames, _) = processor.extract([samples, samples[: rate // 2]])
    stream = processor.open_stream()
    for piece in samples.split(rate // 50):
        stream.append(piece)
        processor.extract_streaming_batch([stream])
    stream.finish()
    processor.extract_streaming_batch([stream])
    expected = torch.from_numpy(reference(samples.numpy(), rate, bins)).float()
    assert frames == stream.frames_ready == len(expected) > 190
    torch.testing.assert_close(batch[0], expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(stream.window(frames), expected, rtol=0, atol=tolerance)


class TestScale:
    """pytorch/audio#400, lhotse-speech/lhotse#14: features of [-1, 1] where 16-bit samples are wanted, or reversed."""

    SHIFT = 2 * math.log(32768)

    @pytest.fixture
    def sine(self):
        return np.sin(2 * np.pi * 440 * np.arange(16000) / 16000).astype(np.float32) / 2

    def features(self, sine, scale, streaming=False):
        processor = InputProcessor(FbankFrontend.from_options({}, scale))
        samples = processor.prepare_waveform(sine)
        if not streaming:
            return processor.extract([samples])[0][0]
        stream = processor.open_stream()
        stream.append(samples)
        processor.extract_streaming_batch([stream])
        return stream.window(stream.frames_ready)

    def test_the_scale_is_a_constant_offset(self, sine):
        small, large = self.features(sine, 1.0), self.features(sine, 32768.0)
        above = small > -15
        assert above.float().mean() > 0.2
        assert (large - small)[above].sub(self.SHIFT).abs().max() < 1e-3
        assert pytest.approx(20.794, abs=1e-3) == self.SHIFT

    @pytest.mark.parametrize("streaming", [False, True])
    def test_the_scale_is_applied_once(self, sine, streaming):
        """The features of a waveform that was scaled by hand, on a frontend that does not scale."""
        by_hand = FbankFrontend(FeatureConfig(), 1.0).extract(
            torch.from_numpy(sine * 32768).unsqueeze(0), torch.tensor([16000])
        )[0][0]
        torch.testing.assert_close(self.features(sine, 32768.0, streaming), by_hand, rtol=0, atol=2e-5)

    def test_a_waveform_on_the_wrong_scale_is_detected(self, sine, caplog):
        self.features(sine, 32768.0)
        assert not caplog.records
        self.features(sine * 32768, 32768.0)
        assert "expected in [-1, 1]" in caplog.text
