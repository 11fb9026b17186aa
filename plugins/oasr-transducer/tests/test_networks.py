"""The building blocks: icefall's arithmetic, states, tables, contracts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from oasr_core.models.base import TransducerInterface, TransducerJoiner, TransducerPredictor
from oasr_core.models.layers import pack_modules
from oasr_transducer.networks import Joiner, LstmPredictor, StatelessPredictor, Transducer


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("context_size", [1, 2, 3])
def test_stateless_outputs_are_those_of_the_padded_sequence(context_size):
    predictor = StatelessPredictor(11, 8, context_size)
    tokens = torch.tensor([[0, 3, 10, 10, 1], [0, 7, 2, 5, 4]])
    embedded = predictor.embedding(tokens).transpose(1, 2)
    if context_size > 1:
        padded = functional.pad(embedded, (context_size - 1, 0))
        embedded = functional.conv1d(padded, predictor.conv.weight, groups=2).relu()
    for prepared in (False, True):
        if prepared:
            predictor.prepare()
        state = predictor.init(2)
        for place in range(tokens.shape[1]):
            out, state = predictor.step(tokens[:, place], state)
            torch.testing.assert_close(out, embedded[:, :, place])


def test_a_table_follows_the_weights_only_when_prepared_again():
    predictor = StatelessPredictor(5, 8, 2)
    predictor.prepare()
    assert set(predictor.state_dict()) == {"embedding.weight", "conv.weight"}
    predictor.embedding.weight.mul_(2.0)
    predictor.prepare()
    prepared, _ = predictor.step(torch.tensor([3]), predictor.init(1))
    predictor._table = None
    torch.testing.assert_close(prepared, predictor.step(torch.tensor([3]), predictor.init(1))[0])


def test_lstm_steps_are_the_whole_sequence():
    predictor = LstmPredictor(9, 6, layers=2, embedding_dim=4)
    tokens = torch.tensor([[0, 3, 8], [0, 7, 2]])
    whole, _ = predictor.lstm(predictor.embedding(tokens.T))
    state = predictor.init(2)
    for place in range(3):
        out, state = predictor.step(tokens[:, place], state)
        torch.testing.assert_close(out, whole[place])


@pytest.mark.parametrize("predictor", [StatelessPredictor(9, 8, 3), LstmPredictor(9, 8, layers=2)])
def test_states_are_chosen_and_joined_by_row(predictor):
    _, first = predictor.step(torch.tensor([1, 2]), predictor.init(2))
    _, second = predictor.step(torch.tensor([5]), predictor.init(1))
    mixed = predictor.select(predictor.concat([first, second]), torch.tensor([2, 0, 0]))
    out, _ = predictor.step(torch.tensor([4, 4, 7]), mixed)
    alone, _ = predictor.step(torch.tensor([4]), second)
    torch.testing.assert_close(out[:1], alone)
    pair, _ = predictor.step(torch.tensor([4, 7]), predictor.select(first, torch.tensor([0, 0])))
    torch.testing.assert_close(out[1:], pair)


def test_the_joiner_broadcasts():
    joiner = Joiner(6, 8, 5, 11)
    encoder, predictor = torch.randn(2, 7, 6), torch.randn(2, 8)
    logits = joiner.joint(joiner.project_encoder(encoder), joiner.project_predictor(predictor)[:, None])
    assert logits.shape == (2, 7, 11)
    want = joiner.output_linear(torch.tanh(joiner.encoder_proj(encoder[1, 3]) + joiner.decoder_proj(predictor[1])))
    torch.testing.assert_close(logits[1, 3], want)
    pack_modules(joiner)
    torch.testing.assert_close(
        joiner.joint(joiner.project_encoder(encoder)[:, 3], joiner.project_predictor(predictor)), logits[:, 3]
    )


def test_logits_are_single_precision():
    half = Joiner(6, 8, 5, 11).half()
    assert half.joint(torch.zeros(5).half(), torch.zeros(5).half()).dtype == torch.float32


def test_blocks_fulfil_the_contracts():
    joiner = Joiner(4, 4, 4, 9)
    for predictor in (StatelessPredictor(9, 4, 2), LstmPredictor(9, 4)):
        assert isinstance(predictor, TransducerPredictor)
        assert isinstance(Transducer(predictor, joiner, 9), TransducerInterface)
    assert isinstance(joiner, TransducerJoiner)
