"""Prefix beam search from WeNet's own log posteriors, against WeNet's n best, scores and times."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions

KINDS = ["offline", "stream_c16_lall", "stream_c16_l4"]


def load(oracle, kind):
    tensors = load_file(oracle / f"{kind}.safetensors")
    log_probs = {k.removesuffix(".ctc_log_probs"): v for k, v in tensors.items() if k.endswith(".ctc_log_probs")}
    results = json.loads((oracle / "decode_results.json").read_text())["utterances"]
    return {name: (v, results[name][kind]["ctc_prefix_beam_search"]) for name, v in sorted(log_probs.items())}


def decode(strategy, utterances):
    names = list(utterances)
    tensors = [utterances[name][0] for name in names]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=float("nan"))
    out = EncoderOutput(padded, torch.tensor([len(tensor) for tensor in tensors]), padded)
    return dict(zip(names, strategy.decode_offline(out, [DecodingOptions(n_best=10)] * len(names)), strict=True))


def check(strategy, utterances):
    for name, hyps in decode(strategy, utterances).items():
        want = utterances[name][1]["nbest"]
        assert [hyp.tokens for hyp in hyps.nbest] == [hyp["tokens"] for hyp in want], name
        assert [hyp.score for hyp in hyps.nbest] == pytest.approx([hyp["ctc_score"] for hyp in want], abs=1e-3), name
        for hyp, other in zip(hyps.nbest, want, strict=True):
            # WeNet's time of a token is usually the last frame of its run, ours is always the first.
            assert all(first <= last for first, last in zip(hyp.frames, other["times"], strict=True)), name


@pytest.fixture
def wenets_search(make_strategy):
    return make_strategy(48, search="beam", beam_size=10, first_beam_size=10, blank_threshold=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_n_best_equals_wenets(wenet_digits, wenets_search, kind):
    utterances = load(wenet_digits / "oracle", kind)
    assert len(utterances) == 7
    check(wenets_search, utterances)


@pytest.mark.parametrize("kind", KINDS)
def test_n_best_equals_wenets_on_all_recordings(shared_fixtures, wenets_search, kind):
    utterances = load(shared_fixtures / "wenet_digits" / "oracle", kind)
    assert len(utterances) == 20
    check(wenets_search, utterances)


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_have_the_same_best(wenet_digits, make_strategy, kind):
    utterances = load(wenet_digits / "oracle", kind)
    for name, hyps in decode(make_strategy(48, search="beam"), utterances).items():
        assert hyps.best.tokens == utterances[name][1]["tokens"], name
        assert hyps.best.score == pytest.approx(utterances[name][1]["score"], abs=0.1), name


def wenets_times(log_probs, beam=10):
    """WeNet's own bookkeeping of times beside the sums: the times of every hypothesis."""
    hyps = {(): {"s": 0.0, "ns": float("-inf"), "v_s": 0.0, "v_ns": 0.0, "t_s": [], "t_ns": []}}

    def score(hyp):
        return torch.logaddexp(torch.tensor(hyp["s"]).double(), torch.tensor(hyp["ns"]).double()).item()

    def add(a, b):
        return torch.logaddexp(torch.tensor(a).double(), torch.tensor(b).double()).item()

    low = float("-inf")
    for frame, row in enumerate(log_probs):
        following: dict = {}

        def entry(prefix, following=following):
            return following.setdefault(prefix, {"s": low, "ns": low, "v_s": low, "v_ns": low, "t_s": [], "t_ns": []})

        for label in row.topk(beam).indices.tolist():
            p = row[label].item()
            for prefix, hyp in hyps.items():
                best, times = (hyp["v_s"], hyp["t_s"]) if hyp["v_s"] > hyp["v_ns"] else (hyp["v_ns"], hyp["t_ns"])
                if label == 0:
                    new = entry(prefix)
                    new["s"], new["v_s"], new["t_s"] = add(new["s"], score(hyp) + p), best + p, list(times)
                elif prefix and prefix[-1] == label:
                    new = entry(prefix)
                    new["ns"] = add(new["ns"], hyp["ns"] + p)
                    if hyp["v_ns"] + p > new["v_ns"]:
                        new["v_ns"], new["t_ns"] = hyp["v_ns"] + p, [*hyp["t_ns"][:-1], frame]
                    new = entry((*prefix, label))
                    new["ns"] = add(new["ns"], hyp["s"] + p)
                    if hyp["v_s"] + p > new["v_ns"]:
                        new["v_ns"], new["t_ns"] = hyp["v_s"] + p, [*hyp["t_s"], frame]
                else:
                    new = entry((*prefix, label))
                    new["ns"] = add(new["ns"], score(hyp) + p)
                    if best + p > new["v_ns"]:
                        new["v_ns"], new["t_ns"] = best + p, [*times, frame]
        hyps = dict(sorted(following.items(), key=lambda item: -score(item[1]))[:beam])
    return {p: h["t_s"] if h["v_s"] > h["v_ns"] else h["t_ns"] for p, h in hyps.items()}


def test_both_definitions_of_times_on_one_alignment(wenet_digits, wenets_search):
    # WeNet's times are reproduced by WeNet's rule, so the difference to ours is the rule and not the search.
    utterances = load(wenet_digits / "oracle", "offline")
    name = min(utterances, key=lambda name: len(utterances[name][0]))
    log_probs, want = utterances[name]
    times = wenets_times(log_probs)
    assert times[tuple(want["tokens"])] == want["times"]
    (hyps,) = decode(wenets_search, {name: utterances[name]}).values()
    labels = log_probs.argmax(1).tolist()
    for token, first, last in zip(hyps.best.tokens, hyps.best.frames, want["times"], strict=True):
        assert set(labels[first : last + 1]) == {token}
        assert first == 0 or labels[first - 1] != token
