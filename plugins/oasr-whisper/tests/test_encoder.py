"""The encoder against a plain implementation, and its independence of batch and neighbours."""

from __future__ import annotations

import pytest
import torch

from oasr_core.errors import InvalidAudioError
from oasr_core.models.base import EncoderBatch
from oasr_whisper.encoder import FrameConvolution

FRAMES, MELS = 100, 5


@pytest.fixture(scope="module")
def features():
    torch.manual_seed(1)
    return torch.randn(3, FRAMES, MELS)


def encode(model, features, lengths=None):
    lengths = torch.tensor(lengths or [features.shape[1]] * len(features))
    with torch.inference_mode():
        return model.encoder.encode(EncoderBatch(features, lengths))


def test_every_frame_equals_the_plain_network(tiny, reference, features):
    out = encode(tiny, features[:1])
    torch.testing.assert_close(out.hidden[0], reference.encode(features[0]), atol=2e-5, rtol=0)


def test_an_unprepared_model_computes_the_same(hf, tiny, features):
    from oasr_core.checkpoints.load import load_model

    plain, _ = load_model(hf.convert())
    torch.testing.assert_close(encode(plain, features).hidden, encode(tiny, features).hidden, atol=2e-5, rtol=0)


def test_rows_of_a_batch_equal_the_rows_alone(tiny, features):
    together = encode(tiny, features, [100, 31, 1])
    for row in range(3):
        torch.testing.assert_close(
            together.hidden[row], encode(tiny, features[row : row + 1]).hidden[0], atol=2e-5, rtol=0
        )


def test_lengths_are_half_the_content_rounded_up_and_all_frames_stay(tiny, features):
    out = encode(tiny, features, [100, 31, 1])
    assert out.lengths.tolist() == [50, 16, 1]
    assert out.lengths.tolist() == [tiny.encoder.output_frames(length) for length in (100, 31, 1)]
    assert out.hidden.shape == (3, 50, 16)


@pytest.mark.parametrize("shape", [(1, 98, MELS), (1, 102, MELS), (2, FRAMES, 6)])
def test_features_of_another_extent_are_refused(tiny, shape):
    with pytest.raises(InvalidAudioError, match=r"windows of exactly 100 x 5.*whisper_logmel"):
        encode(tiny, torch.zeros(shape))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_frame_convolution_is_a_convolution(stride):
    torch.manual_seed(0)
    conv = FrameConvolution(3, 4, stride)
    x = torch.randn(2, 10, 3)
    kernel = conv.weight.view(4, 3, 3).transpose(1, 2)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), kernel, conv.bias, stride=stride, padding=1)
    torch.testing.assert_close(conv(x), torch.nn.functional.gelu(expected).transpose(1, 2))


def test_half_precision_stays_near(hf, load, reference, features):
    out = encode(load(hf.convert(), torch.bfloat16), features[:1]).hidden
    assert out.dtype == torch.bfloat16
    assert (out[0].float() - reference.encode(features[0])).abs().mean() < 0.02
