from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from oasr_core.checkpoints.load import LoadReport, _NoRandomInit, load_model
from oasr_core.errors import CheckpointError, UnknownPluginError
from oasr_core.models.base import EncoderBatch


def test_a_model_gets_its_weights_and_keeps_computed_buffers(tiny_bundle):
    model, report = load_model(tiny_bundle)
    assert set(report.mapped) == set(tiny_bundle.state_dict)
    assert report == LoadReport(mapped=report.mapped)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tiny_bundle.state_dict[name])
    assert torch.equal(model.encoder.table, torch.arange(4, dtype=torch.float32))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    out = model.encoder.encode(EncoderBatch(torch.randn(1, 5, 4), torch.tensor([5])))
    assert out.hidden.isfinite().all()


def test_weights_keep_the_dtype_of_the_checkpoint(tiny_bundle):
    halves = {name: tensor.half() for name, tensor in tiny_bundle.state_dict.items()}
    model, _ = load_model(replace(tiny_bundle, state_dict=halves))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_views_with_other_strides_are_loaded(tiny_bundle):
    weights = dict(tiny_bundle.state_dict)
    weights["encoder.linear.weight"] = weights["encoder.linear.weight"].t().contiguous().t()
    model, _ = load_model(replace(tiny_bundle, state_dict=weights))
    assert model.encoder.linear.weight.is_contiguous()
    assert torch.equal(model.encoder.linear.weight, tiny_bundle.state_dict["encoder.linear.weight"])


def test_tensors_that_the_model_does_not_take_are_sorted(tiny_bundle, caplog):
    extra = {"encoder.pe": torch.zeros(2), "punctuation.head": torch.zeros(2), "stranger": torch.zeros(2)}
    with caplog.at_level(logging.WARNING):
        _, report = load_model(replace(tiny_bundle, state_dict={**tiny_bundle.state_dict, **extra}))
    assert report.unused == ("encoder.pe",)
    assert report.lost == {"punctuation": ("punctuation.head",)}
    assert report.dropped == ("stranger",)
    assert "punctuation is not available: punctuation.head" in caplog.text
    assert "1 tensors are not used: stranger" in caplog.text
    assert "encoder.pe" not in caplog.text
    assert "capability lost: punctuation" in report.summary()


def test_missing_and_misshapen_tensors_are_listed(tiny_bundle):
    weights = dict(tiny_bundle.state_dict)
    del weights["head.bias"]
    weights["head.weight"] = torch.zeros(5, 4)
    weights["encoder.norm.bias"] = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(CheckpointError) as caught:
        load_model(replace(tiny_bundle, state_dict=weights))
    message = str(caught.value)
    assert "1 tensors are missing: head.bias" in message
    assert "head.weight (the checkpoint has (5, 4) float32, the model (3, 4) float32)" in message
    assert "encoder.norm.bias (the checkpoint has (4,) int64, the model (4,) float32)" in message
    assert "'tiny'" in message
    assert "converter 'test'" in message


def test_long_lists_are_cut(tiny_bundle):
    extra = {f"stranger.{i}": torch.zeros(1) for i in range(20)}
    _, report = load_model(replace(tiny_bundle, state_dict={**tiny_bundle.state_dict, **extra}))
    assert "stranger.7 and 12 more" in report.summary()


@pytest.mark.parametrize("config", [{}, {"width": "x"}, {"width": None}])
def test_a_configuration_that_builds_nothing_is_refused(tiny_bundle, config):
    with pytest.raises(CheckpointError, match="Architecture 'tiny' cannot be built from the configuration of"):
        load_model(replace(tiny_bundle, config=config))


def test_an_architecture_that_is_not_installed_is_named(tiny_bundle):
    with pytest.raises(UnknownPluginError, match=r"No model named 'nemotron'.*pip install oasr-nemotron"):
        load_model(replace(tiny_bundle, architecture="nemotron"))


def test_random_initialisation_is_left_out_and_constants_are_not():
    before = torch.get_rng_state()
    with _NoRandomInit():
        norm = nn.BatchNorm1d(3)
        for layer in (nn.Linear, nn.Embedding, nn.LSTM, nn.GRU):
            layer(2, 3)
        nn.Bilinear(2, 3, 4)
        nn.Conv1d(2, 3, 3)
        nn.MultiheadAttention(4, 2)
        nn.init.trunc_normal_(torch.empty(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(norm.weight, torch.ones(3))
    assert torch.equal(norm.running_var, torch.ones(3))
    nn.Linear(2, 3)
    assert not torch.equal(torch.get_rng_state(), before)
