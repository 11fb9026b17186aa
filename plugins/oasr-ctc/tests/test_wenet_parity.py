"""Greedy transcripts of the trained digits model, from WeNet's own log posteriors, against WeNet's own results."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions


@pytest.fixture(scope="module")
def results(wenet_digits):
    return json.loads((wenet_digits / "oracle" / "decode_results.json").read_text())["utterances"]


@pytest.fixture(scope="module", params=["offline", "stream_c16_lall", "stream_c16_l4"])
def oracle(request, wenet_digits):
    tensors = load_file(wenet_digits / "oracle" / f"{request.param}.safetensors")
    log_probs = {k.removesuffix(".ctc_log_probs"): v for k, v in tensors.items() if k.endswith(".ctc_log_probs")}
    return request.param, log_probs


def test_tokens_equal_wenets(oracle, results, make_strategy):
    kind, log_probs = oracle
    names = sorted(log_probs)
    assert len(names) >= 7
    lengths = torch.tensor([len(log_probs[name]) for name in names])
    padded = torch.nn.utils.rnn.pad_sequence(
        [log_probs[name] for name in names], batch_first=True, padding_value=float("nan")
    )
    strategy = make_strategy(search="greedy", vocab_size=48)
    hyps = strategy.decode_offline(EncoderOutput(padded, lengths, padded), [DecodingOptions()] * len(names))
    for name, hyp in zip(names, hyps, strict=True):
        assert hyp.best.tokens == results[name][kind]["ctc_greedy_search"]["tokens"], name


def test_chunks_of_sixteen_equal_the_whole(oracle, make_strategy):
    _, log_probs = oracle
    strategy = make_strategy(search="greedy", vocab_size=48)
    sessions = {name: strategy.open(DecodingOptions()) for name in log_probs}
    longest = max(map(len, log_probs.values()))
    for start in range(0, longest, 16):
        here = [name for name in log_probs if len(log_probs[name]) > start]
        pieces = [log_probs[name][start : start + 16] for name in here]
        padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=float("nan"))
        lengths = torch.tensor([len(piece) for piece in pieces])
        last = [start + 16 >= len(log_probs[name]) for name in here]
        strategy.decode_chunk([sessions[name] for name in here], EncoderOutput(padded, lengths, padded), last)
    for name, whole in log_probs.items():
        out = EncoderOutput(whole[None], torch.tensor([len(whole)]), whole[None])
        want = strategy.decode_offline(out, [DecodingOptions()])[0]
        got = strategy.current(sessions[name])
        assert got.best.tokens == want.best.tokens
        assert got.best.frames == want.best.frames
        assert got.best.token_log_probs == want.best.token_log_probs
        assert got.best.score == pytest.approx(want.best.score, abs=1e-5)
