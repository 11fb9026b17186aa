"""The tensor search gives what the compiled one gives."""

from __future__ import annotations

import math
import random

import pytest
import torch

from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_ctc.beam import BeamSearch
from oasr_ctc.greedy import InvalidLogProbsError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def make_tensor_strategy(request, make_strategy, monkeypatch):
    """A strategy whose every search runs in tensor operations on the device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def build(*args, **options):
        strategy = make_strategy(*args, search="beam", **options)

        def advance(streams, log_probs, lengths, limits):
            strategy.search._advance_device(streams, log_probs.to(request.param), lengths, limits)

        monkeypatch.setattr(strategy.search, "_advance_host", advance)
        return strategy

    return build


def same(got, want):
    for name in ("tokens", "frames", "token_log_probs"):
        assert [getattr(hyp, name) for hyp in got.nbest] == [getattr(hyp, name) for hyp in want.nbest]
    for name in ("score", "context_score"):
        scores = [getattr(hyp, name) for hyp in want.nbest]
        assert [getattr(hyp, name) for hyp in got.nbest] == pytest.approx(scores, abs=1e-9)
    for name in ("trailing_silence_frames", "stable_tokens", "reached_cap"):
        assert getattr(got, name) == getattr(want, name)


def random_hotwords(rng, vocab, blank):
    letters = [chr(token - 1) for token in range(1, vocab) if token != blank]
    phrases = {"".join(rng.choice(letters) for _ in range(rng.randint(1, 3))) for _ in range(3)} if letters else ()
    return [{"phrase": p, "boost": rng.choice([2.0, -1.5, 0.7])} for p in sorted(phrases) if p.strip()]


@pytest.mark.parametrize("seed", range(30))
def test_streams_agree_chunk_by_chunk(make_strategy, make_tensor_strategy, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    vocab, beam = rng.choice([2, 3, 4, 6, 20, 90]), rng.choice([1, 2, 3, 5, 10])
    blank = rng.randrange(vocab)
    setting = {
        "beam_size": beam,
        "blank_threshold": rng.choice([1.0, 0.9, 0.6, 0.98, 0.0]),
        "first_beam_size": rng.choice([None, None, 2, 3]),
        "max_seq_len": rng.choice([None, None, 3]),
    }
    host, device = make_strategy(vocab, blank, search="beam", **setting), make_tensor_strategy(vocab, blank, **setting)
    batch, frames = rng.randint(1, 4), rng.randint(1, 12)
    hotwords = random_hotwords(rng, vocab, blank)
    options = [
        DecodingOptions(n_best=rng.randint(1, beam), hotwords=hotwords if rng.random() < 0.6 else ())
        for _ in range(batch)
    ]
    sessions = [[strategy.open(wanted) for wanted in options] for strategy in (host, device)]
    for _ in range(3):
        log_probs = (torch.randn(batch, frames, vocab, generator=generator) * 2).log_softmax(-1)
        log_probs[rng.randrange(batch), rng.randrange(frames)] = -math.inf
        lengths = torch.tensor([rng.randint(0, frames) for _ in range(batch)])
        log_probs[torch.arange(frames)[None] >= lengths[:, None]] = math.nan
        out = EncoderOutput(torch.zeros(1), lengths, log_probs)
        want = host.decode_chunk(sessions[0], out, [False] * batch)
        got = device.decode_chunk(sessions[1], out, [False] * batch)
        for one, other in zip(got, want, strict=True):
            same(one, other)


def test_flat_posteriors_tie_alike(make_strategy, make_tensor_strategy):
    log_probs = torch.full((1, 3, 6), math.log(1 / 6))
    out = EncoderOutput(torch.zeros(1), torch.tensor([3]), log_probs)
    wanted = [DecodingOptions(n_best=8)]
    got = make_tensor_strategy(6, 2, beam_size=8).decode_offline(out, wanted)[0]
    want = make_strategy(6, 2, search="beam", beam_size=8).decode_offline(out, wanted)[0]
    same(got, want)


def test_long_streams_keep_only_what_is_undecided(make_tensor_strategy):
    strategy = make_tensor_strategy(6)
    session = strategy.open(DecodingOptions())
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        log_probs = (torch.randn(1, 16, 6, generator=generator) * 6).log_softmax(-1)
        strategy.decode_chunk([session], EncoderOutput(torch.zeros(1), torch.tensor([16]), log_probs), [False])
    assert len(strategy.search.pool.emissions) <= 2 * 4096


def test_invalid_numbers_change_no_session(make_tensor_strategy):
    strategy = make_tensor_strategy(6)
    session = strategy.open(DecodingOptions())
    log_probs = torch.zeros(1, 4, 6).log_softmax(-1)
    log_probs[0, 2, 1] = math.nan
    with pytest.raises(InvalidLogProbsError, match="frame 2 of row 0"):
        strategy.decode_chunk([session], EncoderOutput(torch.zeros(1), torch.tensor([4]), log_probs), [False])
    assert strategy.current(session).trailing_silence_frames == 0


def test_the_device_of_the_posteriors_chooses(make_strategy, monkeypatch):
    strategy = make_strategy(search="beam")
    taken = []
    monkeypatch.setattr(
        BeamSearch, "_advance_device", lambda self, streams, log_probs, *rest: taken.append(log_probs.device)
    )
    log_probs = torch.zeros(1, 2, 5, device="meta")
    strategy.search.advance([strategy.open(DecodingOptions())], log_probs, torch.tensor([2]))
    assert [device.type for device in taken] == ["meta"]
