"""The trained digits model: icefall's tokens, frames and scores, from icefall's own encoder outputs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_transducer.networks import Joiner, LstmPredictor, StatelessPredictor, Transducer
from oasr_transducer.options import TransducerOptions
from oasr_transducer.strategy import TransducerStrategy


@pytest.fixture(scope="module")
def networks(icefall_digits):
    weights = torch.load(icefall_digits / "exp" / "pretrained.pt", weights_only=True)["model"]
    predictor, joiner = StatelessPredictor(44, 128, 2), Joiner(128, 128, 128, 44)
    for prefix, network in (("decoder.", predictor), ("joiner.", joiner)):
        network.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    predictor.prepare()
    return Transducer(predictor, joiner, 44, blank_id=0, unk_id=2)


@pytest.fixture(scope="module")
def make_strategy(networks):
    def build(interface=networks, **options):
        model = SimpleNamespace(interfaces={"transducer": interface})
        return TransducerStrategy(DecodeContext(model, ByteTokenizer(), TransducerOptions(**options)))

    return build


@pytest.fixture(scope="module")
def results(icefall_digits):
    return json.loads((icefall_digits / "oracle" / "results.json").read_text())["utterances"]


@pytest.fixture(scope="module")
def encoded(icefall_digits):
    tensors = load_file(icefall_digits / "oracle" / "offline.safetensors")
    return {k.removesuffix(".encoder_out"): v for k, v in tensors.items() if k.endswith(".encoder_out")}


def as_batch(rows):
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan"))
    return EncoderOutput(padded, torch.tensor([len(row) for row in rows]))


def decode(strategy, rows, n_best=1):
    return strategy.decode_offline(as_batch(rows), [DecodingOptions(n_best=n_best)] * len(rows))


def test_greedy_is_icefalls(make_strategy, encoded, results):
    assert len(encoded) >= 4
    for name, hyps in zip(encoded, decode(make_strategy(), list(encoded.values())), strict=True):
        want = results[name]["transducer_greedy"]
        assert (hyps.best.tokens, hyps.best.frames) == (want["tokens"], want["timestamps"]), name


def test_beam_search_is_icefalls(make_strategy, encoded, results):
    for name, hyps in zip(encoded, decode(make_strategy(search="beam"), list(encoded.values()), 4), strict=True):
        want = results[name]["modified_beam_search_beam4"]["nbest"]
        assert [(h.tokens, h.frames) for h in hyps.nbest] == [(w["tokens"], w["timestamps"]) for w in want], name
        assert [h.score for h in hyps.nbest] == pytest.approx([w["log_prob_norm"] for w in want], abs=1e-3), name


@pytest.mark.parametrize("chunk", [16, 32])
def test_streaming_greedy_is_icefalls_chunk_by_chunk(make_strategy, icefall_digits, chunk):
    tensors = load_file(icefall_digits / "oracle" / f"streaming_chunk{chunk}.safetensors")
    oracle = json.loads((icefall_digits / "oracle" / f"streaming_chunk{chunk}.json").read_text())["utts"]
    pieces = tokens_file(icefall_digits / "data" / "lang_bpe" / "tokens.txt")
    chunks = {
        k.removesuffix(".encoder_out"): v
        for k, v in tensors.items()
        if k.count(".") == 1 and k.endswith(".encoder_out")
    }
    assert len(chunks) >= 3
    strategy = make_strategy()
    sessions = {name: strategy.open(DecodingOptions()) for name in chunks}
    for index in range(max(map(len, chunks.values()))):
        here = [name for name in chunks if index < len(chunks[name])]
        out = as_batch([chunks[name][index] for name in here])
        got = strategy.decode_chunk([sessions[name] for name in here], out, [False] * len(here))
        for name, hyps in zip(here, got, strict=True):
            text = "".join(pieces[token] for token in hyps.best.tokens).replace("\u2581", " ").strip()
            assert text == oracle[name]["transducer_greedy"]["partial_text_per_chunk"][index], (name, index)
    for name, session in sessions.items():
        want = oracle[name]["transducer_greedy"]
        best = strategy.current(session).best
        assert (best.tokens, best.frames) == (want["tokens"], want["timestamps"]), name


def tokens_file(path):
    lines = (line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return {int(number): piece for piece, number in lines}


@pytest.mark.parametrize("options", [{}, {"max_sym_per_frame": 5}, {"search": "beam"}])
@pytest.mark.parametrize("recurrent", [False, True])
def test_chunks_batches_and_orders_change_nothing(make_strategy, networks, encoded, options, recurrent):
    interface = networks
    if recurrent:
        torch.manual_seed(4)
        predictor = LstmPredictor(44, 128, layers=2)
        with torch.no_grad():  # strong enough that every token matters
            predictor.embedding.weight.mul_(4.0)
        interface = Transducer(predictor, networks.joiner, 44, unk_id=2)
    strategy = make_strategy(interface, **options)
    names = list(encoded)[:6]
    alone = {name: decode(strategy, [encoded[name]], 1)[0].best for name in names}
    together = decode(strategy, [encoded[name] for name in reversed(names)])
    for name, hyps in zip(reversed(names), together, strict=True):
        assert (hyps.best.tokens, hyps.best.frames) == (alone[name].tokens, alone[name].frames), name
        assert hyps.best.score == pytest.approx(alone[name].score, abs=1e-3)
    for size in (1, 7):
        sessions = {name: strategy.open(DecodingOptions()) for name in names}
        for start in range(0, max(len(encoded[name]) for name in names), size):
            here = [name for name in names if start < len(encoded[name])]
            out = as_batch([encoded[name][start : start + size] for name in here])
            strategy.decode_chunk([sessions[name] for name in here], out, [False] * len(here))
        for name, session in sessions.items():
            best = strategy.current(session).best
            assert (best.tokens, best.frames) == (alone[name].tokens, alone[name].frames), (name, size)
            assert best.token_log_probs == pytest.approx(alone[name].token_log_probs, abs=1e-3)


def test_encoder_outputs_of_inference_mode_are_taken(make_strategy, encoded):
    with torch.inference_mode():
        rows = [next(iter(encoded.values())) * 1.0]
    for options in ({}, {"search": "beam"}):
        strategy = make_strategy(**options)
        session = strategy.open(DecodingOptions())
        (hyps,) = strategy.decode_chunk([session], as_batch(rows), [True])
        assert hyps.best.tokens
        strategy.close(session)
