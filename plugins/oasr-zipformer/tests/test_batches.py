"""Nothing of a row depends on its neighbours or its padding, offline and in a cohort."""

from __future__ import annotations

import math
import random

import pytest
import torch

from oasr_zipformer.random_weights import random_config, random_model

#: Times the largest magnitude.
TOLERANCE = 5e-5


def small(**encoder):
    stack = {"num_heads": 2, "query_head_dim": 8, "value_head_dim": 4, "pos_head_dim": 4}
    stacks = [
        {"num_layers": 1, "downsampling": rate, "dim": dim, "feedforward_dim": 32, "conv_kernel": kernel, **stack}
        for rate, dim, kernel in ((1, 16, 31), (2, 24, 15), (4, 16, 7))
    ]
    settings = {"stacks": stacks, "embed_channels": (4, 8, 16), "pos_dim": 12, "left_context_frames": 32, **encoder}
    return random_model(random_config(vocab_size=11, **settings), seed=3)


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "noncausal"])
def model(request):
    return small(causal=request.param)


def same(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCE * max(want.abs().max().item(), 1.0), rtol=0)


def noise(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 80, generator=generator) * 3 - 8 for length in lengths]


@pytest.mark.parametrize("poison", [math.nan, 1e4, -math.inf])
def test_padding(model, offline, poison):
    """Lengths around every remainder of the rates, short ones (less than a convolution's kernel) among them."""
    utterances = noise(*range(9, 29), 60, 61, 90, 131)
    rows = offline(model, *utterances, poison=poison, extra=13)
    for row, utterance in zip(rows, utterances, strict=True):
        same(row, offline(model, utterance)[0])


def test_trained_model_in_a_batch(digits, offline, feats):
    names = sorted(feats, reverse=True)
    rows = offline(digits, *(feats[name] for name in names), poison=math.nan)
    for row, name in zip(rows, names, strict=True):
        same(row, offline(digits, feats[name])[0])


def test_long_utterances_are_cut_into_blocks(model, offline, monkeypatch):
    """Blocks of queries and of the front-end leave no seam."""
    (utterance,) = noise(400, seed=5)
    whole = offline(model, utterance)[0]
    monkeypatch.setattr("oasr_zipformer.attention._QUERIES", 7)
    monkeypatch.setattr("oasr_zipformer.embed._BLOCK_BYTES", 1)
    same(offline(model, utterance)[0], whole)
    same(offline(model, utterance, noise(111)[0], poison=math.nan)[0], whole)


def test_position_tables_grow(offline):
    """A long utterance before does not change a short one."""
    model = small(causal=True)
    (short,) = noise(120)
    before = offline(model, short)[0]
    offline(model, *noise(2400, seed=1))
    same(offline(model, short)[0], before)


def test_too_short(model, offline):
    rows = offline(model, *noise(8, 3, 40), poison=math.nan)
    assert [len(row) for row in rows] == [0, 0, model.encoder.output_frames(40)]
    same(rows[2], offline(model, *noise(8, 3, 40)[2:])[0])
    assert [len(row) for row in offline(model, *noise(8, 3))] == [0, 0]
    assert model.encoder.output_frames(model.encoder.min_frames) == 1


def test_packed_is_the_same(model, offline):
    from oasr_core.models.base import EncoderBatch

    features = torch.stack(noise(50, 50))
    with torch.inference_mode():
        packed = model.encoder.encode(EncoderBatch(features, torch.tensor([50, 33]), packed=True))
    same(packed.hidden[1, : packed.lengths[1]], offline(model, features[1, :33])[0])


def test_streams_of_any_age_share_a_forward(streams):
    """Random cohorts: order, neighbours and ages change nothing; a stream's row is used again after another."""
    encoder = small(causal=True).encoder
    utterances = noise(200, 7, 64, 130, 33, seed=9)
    alone = [streams(encoder, 8, [utterance]).finish(0) for utterance in utterances]
    driver = streams(encoder, 8, utterances)
    chance = random.Random(4)
    while pending := [row for row in range(len(utterances)) if driver.pending(row)]:
        driver.step(chance.sample(pending, chance.randint(1, len(pending))))
    for row, want in enumerate(alone):
        same(torch.stack(driver.outputs[row]), want)
    driver.store.free("1")
    driver.store.allocate("1")
    driver.starts[1], driver.outputs[1] = 0, []
    same(driver.finish(1), alone[1])


def test_causal_output_does_not_see_the_future(streams):
    """What follows a window changes none of its frames."""
    encoder = small(causal=True).encoder
    (utterance,) = noise(200)
    changed = utterance.clone()
    window = encoder.chunk_geometry(8).window
    changed[window:] = 5.0
    first, second = (streams(encoder, 8, [each]).finish(0) for each in (utterance, changed))
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])
