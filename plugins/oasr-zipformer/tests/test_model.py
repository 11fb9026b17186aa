"""What the network declares and refuses."""

from __future__ import annotations

import pytest
import torch

from oasr_core.errors import CheckpointError, ConfigError
from oasr_core.models.base import CtcInterface, Slot, TransducerInterface
from oasr_zipformer.activation import BiasNorm
from oasr_zipformer.attention import position_table
from oasr_zipformer.layouts import context_mask
from oasr_zipformer.model import ZipformerModel
from oasr_zipformer.random_weights import random_config


def test_interfaces(digits):
    assert isinstance(digits.interfaces["ctc"], CtcInterface)
    transducer = digits.interfaces["transducer"]
    assert isinstance(transducer, TransducerInterface)
    assert (transducer.blank_id, transducer.unk_id, transducer.vocab_size) == (0, 2, 44)
    assert digits.vocab_size == 44


def test_encoder_facts(digits):
    encoder = digits.encoder
    assert (encoder.subsampling_rate, encoder.feature_dim, encoder.output_dim) == (4, 80, 128)
    assert [encoder.output_frames(n) for n in (0, 8, 9, 12, 13, 68, 244)] == [0, 0, 1, 1, 2, 15, 59]


def test_slots(digits):
    """A stream's state is declared whole, in slots of fixed extent."""
    specs = digits.encoder.state_specs
    assert all(isinstance(spec, Slot) and spec.init == 0.0 for spec in specs)
    by_name = {spec.name: spec for spec in specs}
    assert by_name["embed"].shape == (3, 19, 128)
    assert by_name["stack3.attention"].shape == (1, 16, 256 + 96 + 96 + 96)
    assert by_name["stack1.convolution"].shape == (2, 2, 15, 64)


def test_geometry(digits):
    geometry = digits.encoder.chunk_geometry(8)
    assert (geometry.window, geometry.stride, geometry.output_frames, geometry.flush_frames) == (45, 32, 8, 43)
    for size in (0, -4, 6):
        with pytest.raises(ConfigError, match="multiple of 4"):
            digits.encoder.chunk_geometry(size)


def test_noncausal_does_not_stream():
    with torch.device("meta"):
        encoder = ZipformerModel.from_config(random_config(causal=False)).encoder
    assert encoder.streaming_kind == "none"
    assert encoder.state_specs == ()
    with pytest.raises(ConfigError, match="cannot stream"):
        encoder.chunk_geometry(8)


def test_default_dimensions():
    """icefall's medium model has 65 million parameters."""
    with torch.device("meta"):
        model = ZipformerModel.from_config(random_config(transducer={}, causal=False, ctc=False))
    assert 64e6 < sum(parameter.numel() for parameter in model.parameters()) < 67e6
    assert model.encoder.output_dim == 512


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_siz": 3}, "Unknown key 'vocab_siz'. Did you mean 'vocab_size'"),
        ({"encoder": {"stacks": []}}, "encoder.stacks"),
        ({"ctc": False}, "nothing could decode"),
        ({"unk_id": 500}, "unk_id 500 is not below"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(CheckpointError, match=message):
        ZipformerModel.from_config({**random_config(), **config})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left_context_frames": 60}, "no multiple of the downsampling 8 of stack 3"),
        ({"left_context_frames": 16}, "looks back"),
        ({"feature_dim": 4}, "feature_dim 4 is too small"),
        ({"pos_dim": 47}, "pos_dim"),
    ],
)
def test_bad_encoders(change, message):
    with pytest.raises(CheckpointError, match=message):
        random_config(**change)


def test_position_table():
    """Offset 0 is the angle 0; the table is even in its cosines and odd in its sines; the last column is one."""
    table = position_table(5, 8, torch.device("cpu"))
    assert table.shape == (9, 8)
    torch.testing.assert_close(table[4], torch.tensor([1.0, 0.0] * 3 + [1.0, 1.0]))
    torch.testing.assert_close(table[:4, 0::2].flip(0), table[5:, 0::2])
    torch.testing.assert_close(table[:4, 1:7:2].flip(0), -table[5:, 1:7:2])


def test_masks_fit_half_precision():
    """Left context that is not there yet weighs exactly nothing, at every precision."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = context_mask(torch.tensor([0, 3, 8]), left=8, chunk=4, downsampling=2, dtype=dtype)
        weights = torch.softmax(mask, dim=-1)[:, 0]
        assert (weights > 0).sum(1).tolist() == [2, 3, 6]


def test_silent_padding_stays_finite():
    """A frame that equals the bias of its norm has length zero."""
    norm = BiasNorm(4)
    norm.pack()
    assert torch.equal(norm(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_prepare_twice(digits, offline, feats):
    before = offline(digits, feats["digits_00"])[0]
    digits.prepare()
    assert torch.equal(offline(digits, feats["digits_00"])[0], before)
