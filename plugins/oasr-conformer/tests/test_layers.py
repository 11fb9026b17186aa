"""The layer waist gives the same numbers packed and plain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oasr_core.models import layers
from oasr_core.models.layers import Conv2d, DepthwiseConv1d, LayerNorm, Linear, attention, length_bias, pack_modules

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "swish", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_linear(dtype, activation, bias):
    layer = Linear(24, 40, bias=bias, activation=activation).to(dtype)
    x = torch.randn(2, 5, 24, dtype=dtype)
    linear = F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    function = {"none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "swish": F.silu, "sigmoid": torch.sigmoid}
    want = function[activation](linear)
    plain = layer(x)
    layer.pack()
    layer.pack()
    for got in (plain, layer(x), layer(x[0])[None]):
        torch.testing.assert_close(got.float(), want[: len(got)], atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_linear_with_sum_and_product(dtype, packed):
    layer = Linear(24, 24).to(dtype)
    x, other = torch.randn(2, 5, 24, dtype=dtype), torch.randn(2, 5, 24, dtype=dtype)
    kept = other.clone()
    want = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    if packed:
        pack_modules(torch.nn.Sequential(layer))
    tolerance = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(layer.add_to(other, x).float(), want + other.float(), **tolerance)
    torch.testing.assert_close(layer.multiply(other, x).float(), want * other.float(), **tolerance)
    assert torch.equal(other, kept)


@torch.no_grad()
def test_linear_without_the_fused_kernel(monkeypatch):
    """Where torch lacks the operator the plain kernel serves, and the weight stays."""
    monkeypatch.setattr("oasr_core.models.layers.linear.onednn_serves", lambda *_: False)
    layer = Linear(8, 8, activation="swish")
    x = torch.randn(3, 8)
    want = layer(x)
    layer.pack()
    assert layer.weight is not None
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_convolutions(dtype):
    conv = Conv2d(1, 6, 3, 2, activation="relu").to(dtype)
    x = torch.randn(2, 1, 15, 12, dtype=dtype).contiguous(memory_format=torch.channels_last)
    want = F.relu(F.conv2d(x.float(), conv.weight.float(), conv.bias.float(), stride=2))
    plain = conv(x)
    conv.pack()
    for got in (plain, conv(x)):
        torch.testing.assert_close(got.float(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    depthwise = DepthwiseConv1d(6, 5).to(dtype)
    y = torch.randn(2, 11, 6, dtype=dtype)
    for padding in (0, 2):
        want = F.conv1d(
            y.float().transpose(1, 2), depthwise.weight.float(), depthwise.bias.float(), padding=padding, groups=6
        ).transpose(1, 2)
        got = depthwise(y, padding=padding)
        assert got.is_contiguous()
        torch.testing.assert_close(got.float(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_layer_norm(dtype):
    norm = LayerNorm(16, eps=1e-5).to(dtype)
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(3, 16, dtype=dtype)
    want = F.layer_norm(x.float(), (16,), norm.weight.float(), norm.bias.float(), 1e-5)
    norm.pack()
    torch.testing.assert_close(norm(x).float(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 16, 19, 37, 64])
@torch.no_grad()
def test_attention_with_key_bias(dtype, keys):
    """Padding of the key count, a broadcast bias and masked keys change nothing but speed."""
    query = torch.randn(2, 7, 3, 8, dtype=dtype)
    key, value = torch.randn(2, keys, 3, 8, dtype=dtype), torch.randn(2, keys, 3, 8, dtype=dtype)
    lengths = torch.tensor([keys, max(keys - 5, 1)])
    bias = torch.randn(1, 3, 1, keys) + length_bias(lengths, keys)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) * 8**-0.5 + bias
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.float())
    got = attention(query, key, value, bias=bias)
    torch.testing.assert_close(got.float(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    plain = attention(query, key, value)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) * 8**-0.5
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.float())
    torch.testing.assert_close(plain.float(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])


def test_a_row_without_keys_stays_finite():
    bias = length_bias(torch.tensor([0, 3]), 20)
    x = torch.randn(2, 20, 2, 8)
    assert attention(x, x, x, bias=bias).isfinite().all()


def test_public_names():
    assert all(hasattr(layers, name) for name in layers.__all__)
