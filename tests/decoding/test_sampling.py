"""Choosing tokens: greedy, by sampling within limits, and the best continuations of beams."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.decoding.sampling import Draw, Sampling, best_continuations, best_openings, choose

GREEDY = Draw(Sampling(), None)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def logits_of(seed, *shape):
    return torch.randn(*shape, generator=generator(seed)) * 3


def test_greedy_takes_the_most_probable_and_tells_its_log_posterior():
    logits = logits_of(1, 4, 11)
    tokens, log_probs = choose(logits, [GREEDY] * 4)
    assert tokens == logits.argmax(-1).tolist()
    assert log_probs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-5)


@given(st.integers(0, 10**6), st.floats(0.1, 5.0), st.integers(0, 12), st.floats(0.05, 1.0))
@settings(deadline=None, max_examples=40)
def test_draws_stay_within_top_k_and_top_p(seed, temperature, top_k, top_p):
    logits = logits_of(seed, 12)
    draw = Draw(Sampling(1, False, temperature, top_k, top_p), generator(seed))
    (token,), (log_prob,) = choose(logits[None], [draw])
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    allowed = order[: top_k or 12]
    mass, kept = sum(probabilities[each].item() for each in allowed), []
    for each in allowed:
        if sum(probabilities[k].item() for k in kept) < top_p * mass + 1e-5:
            kept.append(each)
    assert token in kept
    assert log_prob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-5)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    logits = logits_of(3, 20)
    for sampling in (Sampling(1, False, 2.0, 1, 1.0), Sampling(1, False, 2.0, 0, 1e-6)):
        assert choose(logits[None], [Draw(sampling, generator())])[0] == [logits.argmax().item()]


def test_draws_follow_the_posteriors():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    draw = Draw(Sampling(1, False, 1.0), generator(5))
    counts = [0, 0, 0]
    for _ in range(600):
        counts[choose(logits[None], [draw])[0][0]] += 1
    assert [count / 600 for count in counts] == pytest.approx([0.5, 0.3, 0.2], abs=0.07)


def test_a_draw_depends_on_its_own_seed_alone():
    logits = logits_of(4, 3, 50)
    warm = Sampling(1, False, 1.0)
    alone = [choose(logits[i : i + 1], [Draw(warm, generator(i))])[0][0] for i in range(3)]
    together, _ = choose(logits, [Draw(warm, generator(i)) for i in range(3)])
    among_greedy, _ = choose(logits, [GREEDY, Draw(warm, generator(1)), GREEDY])
    assert together == alone
    assert among_greedy == [logits[0].argmax().item(), alone[1], logits[2].argmax().item()]


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 8), -math.inf)
    logits[0, 3] = -40.0
    assert choose(logits, [Draw(Sampling(1, False, 100.0), generator())]) == ([3], [0.0])


@pytest.mark.parametrize("temperature", [1e-40, 1e-3])
def test_the_lowest_temperatures_take_the_most_probable(temperature):
    logits = logits_of(6, 20)
    logits[logits.argmin()] = -math.inf
    assert choose(logits[None], [Draw(Sampling(1, False, temperature), generator())])[0] == [logits.argmax().item()]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1, False, 0.7, 5, 0.9)])
def test_logits_that_are_no_numbers_give_a_log_posterior_that_is_none(sampling):
    logits = torch.stack([torch.full((6,), math.nan), torch.arange(6.0)])
    tokens, log_probs = choose(logits, [Draw(sampling, generator()), GREEDY])
    assert math.isnan(log_probs[0])
    assert (tokens[1], math.isnan(log_probs[1])) == (5, False)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_continuations_are_the_best_of_all(seed, requests, width):
    vocab = 7
    logits = logits_of(seed, requests, width, vocab)
    scores = (-logits_of(seed + 1, requests, width).abs()).tolist()
    parents, tokens, totals, own = best_continuations(logits, scores)
    log_probs = logits.log_softmax(-1)
    for r in range(requests):
        every = sorted(
            ((scores[r][p] + log_probs[r, p, t].item(), p, t) for p in range(width) for t in range(vocab)), reverse=True
        )[: 2 * width]
        assert totals[r] == pytest.approx([total for total, _, _ in every], abs=1e-4)
        assert sorted(zip(parents[r], tokens[r], strict=True)) == sorted((p, t) for _, p, t in every)
        for p, t, log_prob in zip(parents[r], tokens[r], own[r], strict=True):
            assert log_prob == pytest.approx(log_probs[r, p, t].item(), abs=1e-5)


def test_openings_continue_the_one_empty_hypothesis():
    logits = logits_of(6, 2, 9)
    parents, tokens, totals, own = best_openings(logits, 3)
    assert parents == [[0] * 6] * 2
    assert totals == own
    assert tokens == logits.topk(6).indices.tolist()
    assert [len(row) for row in best_openings(logits, 8)[1]] == [9, 9]
