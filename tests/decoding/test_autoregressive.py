"""The machinery of autoregressive families: groups, memory, failures; a request's result does not know its company."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.cache.decoder_kv import PAGE
from oasr_core.decoding.base import DecodeContext, NoOptions
from oasr_core.decoding.budget import StepBudget
from oasr_core.decoding.decode_group import MemoryRows
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.decoding.options import AutoregressiveOptions
from oasr_core.errors import CachePoolExhausted, ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions

WAYS = {
    "greedy dense": ({"kv_storage": "dense"}, {}),
    "greedy paged": ({"kv_storage": "paged"}, {}),
    "beam": ({"beam_size": 4}, {}),
    "one draw": ({"kv_storage": "paged"}, {"temperature": 1.0}),
    "five draws": ({}, {"temperature": 1.5, "n_best": 5}),
}


def ended_of(toy, strategy, out, requests, **steps):
    strategy.begin_offline(out, requests)
    return toy.drain(strategy, **steps)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_gives_what_each_gives_alone(toy, way):
    options, asked = WAYS[way]
    out, requests = toy.requests(8, **asked)
    expected = toy.alone(out, requests, **options)
    ended, _ = ended_of(toy, toy.strategy(**options), out, requests)
    assert toy.told(ended) == expected
    assert len({tuple(tokens[0]) for tokens, _, _ in expected.values()}) > 3, "the toy says the same to everybody"
    assert {cap for _, _, cap in expected.values()} == {False, True}


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_arrival_does_not_matter(toy, way, merge, seed):
    options, asked = WAYS[way]
    rng = random.Random(seed)
    out, requests = toy.requests(9, seed=seed, **asked)
    expected = toy.alone(out, requests, **options)
    strategy = toy.strategy(**options, merge_groups=merge)
    waiting = list(range(9))
    ended = {}
    while waiting or strategy.has_pending():
        count = rng.randint(0, min(3, len(waiting)))
        if count:
            rows, waiting = waiting[:count], waiting[count:]
            strategy.begin_offline(toy.part(out, rows), [requests[row] for row in rows])
            assert not merge or len(strategy._groups) <= 1
        for progress in strategy.advance(StepBudget(rng.randint(1, 4))):
            assert progress.error is None
            if progress.finished:
                ended[progress.request_id] = progress
    assert toy.told(ended) == expected


def test_kinds_do_not_mix_and_do_not_wait_for_each_other(toy):
    out, requests = toy.requests(6)
    warm = [request.options.model_copy(update={"temperature": 1.0, "n_best": 3}) for request in requests]
    mixed = [
        type(request)(request.request_id, warm[index] if index % 2 else request.options)
        for index, request in enumerate(requests)
    ]
    expected = toy.alone(out, mixed)
    strategy = toy.strategy()
    strategy.begin_offline(out, mixed)
    assert len(strategy._groups) == 2
    assert toy.told(toy.drain(strategy)[0]) == expected


def test_dense_and_paged_give_the_same(toy):
    out, requests = toy.requests(8, seed=3)
    found = [
        toy.told(ended_of(toy, toy.strategy(kv_storage=storage), out, requests)[0]) for storage in ("dense", "paged")
    ]
    assert found[0] == found[1]


def test_a_beam_of_one_is_greedy(toy):
    out, requests = toy.requests(8, seed=4)
    beam = toy.strategy()
    beam.beam_of_one = True
    greedy = toy.told(ended_of(toy, toy.strategy(), out, requests)[0])
    assert toy.told(ended_of(toy, beam, out, requests)[0]) == greedy


def test_histories_are_those_of_the_tokens(toy):
    """Every log posterior of a beam's winner is what the decoder says to the tokens before, without any history."""
    head = toy.head()
    out, requests = toy.requests(5, seed=5)
    ended, _ = ended_of(toy, toy.strategy(head, beam_size=4), out, requests)
    for index, request in enumerate(requests):
        best = ended[request.request_id].hypotheses.best
        part = toy.part(out, [index])
        memory = head.memory(part.hidden, part.lengths)
        prompt = [int(word) for word in request.options.prompt.split()]
        for place, token in enumerate(best.tokens):
            logits = toy.next_logits(head, memory, prompt, best.tokens[:place])
            assert best.token_log_probs[place] == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-4)


def test_a_beam_finds_what_a_plain_search_finds(toy):
    """A textbook beam search without histories: the ends among the best are kept aside, the best others go on."""
    head, width = toy.head(), 3
    out, requests = toy.requests(4, seed=6)
    ended, _ = ended_of(toy, toy.strategy(head, beam_size=width), out, requests)
    for index, request in enumerate(requests):
        part = toy.part(out, [index])
        memory = head.memory(part.hidden, part.lengths)
        prompt = [int(word) for word in request.options.prompt.split()]
        beam, finished = [((), 0.0)], []
        for length in range(1, request.options.max_new_tokens + 1):
            grown = []
            for tokens, score in beam:
                log_probs = toy.next_logits(head, memory, prompt, tokens).log_softmax(-1)
                grown += [((*tokens, t), score + log_probs[t].item()) for t in range(head.vocab_size)]
            grown = sorted(grown, key=lambda each: -each[1])[: 2 * width]
            last = length == request.options.max_new_tokens
            for tokens, score in grown[:width]:
                if tokens[-1] == 0 or last:
                    kept = tokens[:-1] if tokens[-1] == 0 else tokens
                    finished.append((score / max(len(kept), 1), kept))
            beam = [each for each in grown if each[0][-1] != 0][:width]
            if last or len(finished) >= width:
                break
        score, tokens = max(finished)
        best = ended[request.request_id].hypotheses.best
        assert tuple(best.tokens) == tokens
        assert best.score == pytest.approx(score, abs=1e-4)


def test_draws_depend_on_the_seed(toy):
    out, requests = toy.requests(1, temperature=1.0, n_best=3, max_new_tokens=20)
    said = set()
    for seed in (0, 1, 2, 0, None):
        options = requests[0].options.model_copy(update={"seed": seed})
        strategy = toy.strategy()
        strategy.begin_offline(out, [type(requests[0])("r", options)])
        nbest = toy.drain(strategy)[0]["r"].hypotheses.nbest
        assert len(nbest) == 3
        assert [each.score for each in nbest] == sorted((each.score for each in nbest), reverse=True)
        said.add(str([each.tokens for each in nbest]))
    assert len(said) == 3, "no seed is seed 0, and each other seed says something else"


@pytest.mark.parametrize("way", WAYS)
def test_a_request_without_numbers_fails_alone(toy, way):
    options, asked = WAYS[way]
    out, requests = toy.requests(4, seed=7, **asked)
    expected = toy.alone(out, requests, **options)
    out.hidden[1] = math.nan
    ended, _ = ended_of(toy, toy.strategy(**options), out, requests)
    assert isinstance(ended["r1"].error, FloatingPointError)
    del ended["r1"], expected["r1"]
    assert toy.told(ended) == expected


@pytest.mark.parametrize("storage", ["dense", "paged"])
def test_a_failing_step_costs_its_group_alone(toy, storage):
    head = toy.head()
    out, requests = toy.requests(4, seed=8, max_new_tokens=30)
    strategy = toy.strategy(head, kv_storage=storage, budget=10**9)
    for request in requests:
        assert strategy.reserve(request)
    strategy.begin_offline(toy.part(out, [0, 1]), requests[:2])
    head.broken_at = head.steps + 1
    ended, _ = toy.drain(strategy)
    assert {name: str(progress.error) for name, progress in ended.items()} == {
        "r0": "the decoder is broken",
        "r1": "the decoder is broken",
    }
    head.broken_at = None
    strategy.begin_offline(toy.part(out, [2, 3]), requests[2:])
    ended, _ = toy.drain(strategy)
    assert toy.told(ended) == {name: toy.alone(out, requests)[name] for name in ("r2", "r3")}
    assert strategy._budget.used == 0
    assert strategy._pool is None or strategy._pool.blocks.num_free == strategy._pool.blocks.num_blocks


def test_a_failing_prefill_leaves_nothing_behind_and_others_untouched(toy):
    head = toy.head()
    out, requests = toy.requests(4, seed=9)
    strategy = toy.strategy(head, kv_storage="paged")
    strategy.begin_offline(toy.part(out, [0, 1]), requests[:2])
    free = strategy._pool.blocks.num_free
    head.broken_at = head.steps + 1
    with pytest.raises(RuntimeError, match="broken"):
        strategy.begin_offline(toy.part(out, [2, 3]), requests[2:])
    assert strategy._pool.blocks.num_free == free
    head.broken_at = None
    ended, _ = toy.drain(strategy)
    assert toy.told(ended) == {name: toy.alone(out, requests)[name] for name in ("r0", "r1")}


def test_what_cannot_be_finished_fails_alone(toy):
    out, requests = toy.requests(3, seed=10)
    spoiled = type(requests[1])("r1", requests[1].options.model_copy(update={"task": "spoil"}))
    ended, _ = ended_of(toy, toy.strategy(), out, [requests[0], spoiled, requests[2]])
    assert isinstance(ended["r1"].error, ValueError)
    expected = toy.alone(out, requests)
    assert toy.told({name: ended[name] for name in ("r0", "r2")}) == {name: expected[name] for name in ("r0", "r2")}


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_request_is_gone(toy, way):
    options, asked = WAYS[way]
    out, requests = toy.requests(4, seed=11, **{"max_new_tokens": 25, **asked})
    expected = toy.alone(out, requests, **options)
    strategy = toy.strategy(**options, budget=10**9)
    for request in requests:
        strategy.reserve(request)
    strategy.begin_offline(out, requests)
    strategy.advance(StepBudget(1))
    strategy.cancel("r1")
    strategy.cancel("nobody")
    ended, _ = toy.drain(strategy)
    assert set(ended) <= {"r0", "r2", "r3"}
    assert toy.told(ended) == {name: expected[name] for name in ended}
    assert strategy._budget.used == 0
    assert strategy._pool is None or strategy._pool.blocks.num_free == strategy._pool.blocks.num_blocks


def test_cancelling_the_last_leaves_nothing_pending(toy):
    out, requests = toy.requests(1, seed=1, max_new_tokens=30)
    strategy = toy.strategy()
    strategy.begin_offline(out, requests)
    strategy.cancel("r0")
    assert not strategy.has_pending()
    assert strategy.advance(StepBudget(3)) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_decoded_again_where_the_family_says_so(toy, way):
    options, asked = WAYS[way]
    out, requests = toy.requests(5, seed=12, task="again", **asked)
    expected = toy.alone(out, requests, **options)
    strategy = toy.strategy(**options)
    ended, partials = ended_of(toy, strategy, out, requests)
    assert toy.told(ended) == expected
    assert {len(tokens) for tokens, _, _ in expected.values()} == {3}
    assert {progress.hypotheses.language for progress in ended.values()} == {"second"}
    assert partials


def test_a_second_attempt_that_fails_costs_its_request_alone(toy):
    head = toy.head()
    out, requests = toy.requests(1, seed=12, task="again", max_new_tokens=1)
    strategy = toy.strategy(head)
    strategy.begin_offline(out, requests)
    head.broken_at = head.steps + 1
    ended, _ = toy.drain(strategy)
    assert str(ended["r0"].error) == "the decoder is broken"
    head.broken_at = None
    strategy.begin_offline(out, requests)
    strategy.cancel("r0")
    assert not strategy.has_pending()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_groups_that_cannot_merge_go_on_side_by_side(toy, monkeypatch, caplog, error):
    out, requests = toy.requests(6, seed=13)
    expected = toy.alone(out, requests)

    def short(self, more, most):
        raise error

    monkeypatch.setattr(MemoryRows, "grow", short)
    strategy = toy.strategy()
    for rows in ([0, 1, 2], [3, 4, 5]):
        strategy.begin_offline(toy.part(out, rows), [requests[row] for row in rows])
    assert len(strategy._groups) == 2
    assert "no memory to merge" in caplog.text
    assert toy.told(toy.drain(strategy)[0]) == expected


def test_a_group_joins_any_other_whose_memory_has_its_shape(toy):
    head = toy.head()
    out, requests = toy.requests(3, seed=13, max_new_tokens=30)
    expected = toy.alone(out, requests)
    strategy = toy.strategy(head)
    step, memory = head.step, head.memory
    widths = iter([16, 8, 8])
    head.memory = lambda hidden, lengths: (memory(hidden, lengths)[0].repeat(1, next(widths) // 8),)
    head.step = lambda tokens, state, memory: step(tokens, state, (memory[0][:, :8],))
    for row in range(3):
        strategy.begin_offline(toy.part(out, [row]), [requests[row]])
    assert [len(group.rows) for group in strategy._groups] == [1, 2]
    assert toy.told(toy.drain(strategy)[0]) == expected


def test_the_budget_bounds_steps_and_time(toy):
    head = toy.head()
    out, requests = toy.requests(3, seed=14, max_new_tokens=30)
    strategy = toy.strategy(head)
    strategy.begin_offline(out, requests)
    before = head.steps
    strategy.advance(StepBudget(4))
    assert head.steps == before + 4
    now = iter(range(100))
    strategy.advance(StepBudget(99, 3.0, clock=lambda: next(now)))
    assert head.steps == before + 6
    strategy.advance(StepBudget(99, 0.0))
    assert head.steps == before + 6


def test_groups_take_turns(toy):
    out, requests = toy.requests(4, seed=15, max_new_tokens=30)
    strategy = toy.strategy(merge_groups=False)
    for rows in ([0, 1], [2, 3]):
        strategy.begin_offline(toy.part(out, rows), [requests[row] for row in rows])
    strategy.advance(StepBudget(2))
    lengths = [len(group.rows[0].candidates[0].tokens) for group in strategy._groups]
    assert lengths == [2, 2]


def test_partials_grow_and_keep_what_they_promised(toy):
    out, requests = toy.requests(5, seed=16)
    ended, partials = ended_of(toy, toy.strategy(), out, requests)
    for name, shown in partials.items():
        final = ended[name].hypotheses.best.tokens
        for hyps in shown:
            assert hyps.best.tokens == final[: len(hyps.best.tokens)]
            assert hyps.stable_tokens == len(hyps.best.tokens)
        counts = [len(hyps.best.tokens) for hyps in shown]
        assert counts == sorted(set(counts))
    _, partials = ended_of(toy, toy.strategy(beam_size=3), out, requests)
    assert {hyps.stable_tokens for shown in partials.values() for hyps in shown} == {0}


def test_a_family_that_may_revise_promises_nothing(toy):
    out, requests = toy.requests(3, seed=16)
    strategy = toy.strategy()
    strategy.may_revise = lambda row: row.request.request_id == "r1"
    _, partials = ended_of(toy, strategy, out, requests)
    promised = {name: max(hyps.stable_tokens for hyps in shown) for name, shown in partials.items()}
    assert promised["r1"] == 0
    assert promised["r0"] > 0


def test_probed_tokens_are_shown_for_each_request(toy):
    out, requests = toy.requests(4, seed=17)
    strategy, alone = toy.strategy(), toy.strategy()
    strategy.begin_offline(out, requests)
    seen = dict(strategy.seen)
    for index, request in enumerate(requests):
        alone.begin_offline(toy.part(out, [index]), [request])
        assert alone.seen[request.request_id] == seen[request.request_id]


def test_the_cap_is_the_room_behind_the_prompt(toy):
    out, requests = toy.requests(1)
    long = type(requests[0])("r0", DecodingOptions(prompt=" ".join(["5"] * 60), max_new_tokens=448))
    strategy = toy.strategy()
    strategy.mask = lambda logits, pairs: logits[:, 0].fill_(-torch.inf)
    ended, _ = ended_of(toy, strategy, out, [long])
    hyps = ended["r0"].hypotheses
    assert (len(hyps.best.tokens), hyps.reached_cap) == (4, True)
    with pytest.raises(RequestRefusedError, match="64 tokens and the decoder 64 positions"):
        strategy.begin_offline(out, [type(long)("r0", DecodingOptions(prompt=" ".join(["5"] * 64)))])


def test_memory_is_reserved_until_a_request_ends(toy):
    out, requests = toy.requests(3, seed=18, max_new_tokens=10)
    strategy = toy.strategy()
    size = strategy._ceiling_bytes(requests[0].options)
    tokens = len(requests[0].options.prompt.split()) + 10
    assert size == -(-tokens // PAGE) * PAGE * 2 * 2 * 2 * 4 * 4 + 8 * 4
    strategy = toy.strategy(budget=2 * max(strategy._ceiling_bytes(request.options) for request in requests))
    assert strategy.reserve(requests[0])
    assert strategy.reserve(requests[1])
    assert not strategy.reserve(requests[2])
    strategy.begin_offline(toy.part(out, [0, 1]), requests[:2])
    toy.drain(strategy)
    assert strategy.reserve(requests[2])


def test_what_never_fits_is_refused(toy):
    strategy = toy.strategy(budget=3000)
    with pytest.raises(RequestRefusedError, match="decode_kv_budget_gib"):
        strategy.validate(DecodingOptions(max_new_tokens=400), "offline")
    with pytest.raises(RequestRefusedError, match="n_best=2 needs a beam"):
        strategy.validate(DecodingOptions(n_best=2, max_new_tokens=1), "offline")
    strategy.validate(DecodingOptions(max_new_tokens=1), "offline")
    toy.strategy().validate(DecodingOptions(temperature=1.0, n_best=64), "offline")
    with pytest.raises(RequestRefusedError, match="at most 64 hypotheses"):
        toy.strategy().validate(DecodingOptions(temperature=1.0, n_best=65), "offline")


def test_a_beam_that_the_vocabulary_cannot_fill_is_refused(toy):
    toy.strategy(beam_size=22)
    with pytest.raises(ConfigError, match="beam_size=23 is more than the 23 tokens"):
        toy.strategy(beam_size=23)


def test_a_derived_budget_takes_one_request_at_least(toy):
    model = type("Model", (), {"interfaces": {"toy": toy.head()}})()
    options = AutoregressiveOptions(max_new_tokens=20)
    strategy = toy.Strategy(DecodeContext(model, None, options, kv_budget_bytes=1, kv_budget_derived=True))
    strategy.validate(DecodingOptions(), "offline")
    strategy.validate(DecodingOptions(prompt=" ".join(["5"] * 40)), "offline")  # as the windows of a long file have


@pytest.mark.parametrize("budget", [20_000, 33_333])
def test_the_pool_takes_the_share_of_histories_and_suffices(toy, budget):
    head = toy.head()
    head.memory_elements = 1000
    strategy = toy.strategy(head, kv_storage="paged", budget=budget)
    pool = strategy._pool.blocks.num_blocks * PAGE * strategy._token_bytes()
    assert pool <= max(budget * 0.7, strategy._row_bytes(64, 1))
    for cap in (10, 40, 64):
        options = DecodingOptions(max_new_tokens=cap)
        asking = [IncrementalRequest(f"{cap}-{index}", options) for index in range(32)]
        admitted = [request for request in asking if strategy.reserve(request)]
        assert admitted
        strategy._pool.open([strategy._ceiling(options)] * len(admitted)).release()
        for request in admitted:
            strategy.cancel(request.request_id)


def test_a_pool_without_pages_says_so_and_keeps_those_it_has(toy):
    out, requests = toy.requests(3, seed=19, max_new_tokens=60)
    strategy = toy.strategy(kv_storage="paged", slots=1)
    with pytest.raises(CachePoolExhausted):
        strategy.begin_offline(out, requests)
    assert strategy._pool.blocks.num_free == strategy._pool.blocks.num_blocks
    assert not strategy.has_pending()


def test_a_whole_micro_batch_can_be_decoded_at_once(toy):
    out, requests = toy.requests(4, seed=20)
    strategy = toy.strategy(budget=10**9)
    found = strategy.decode_offline(out, [request.options for request in requests])
    expected = toy.alone(out, requests)
    assert [hyps.best.tokens for hyps in found] == [expected[request.request_id][0][0] for request in requests]
    spoiled = [request.options.model_copy(update={"task": "spoil"}) for request in requests]
    with pytest.raises(ValueError, match="nobody can finish"):
        strategy.decode_offline(out, spoiled)
    assert not strategy.has_pending()
    assert strategy._budget.used == 0
    with pytest.raises(MemoryError, match="4 requests at once"):
        toy.strategy(budget=3000).decode_offline(out, [request.options for request in requests])


def test_options_of_another_kind_are_refused(toy):
    with pytest.raises(TypeError, match="must derive from AutoregressiveOptions"):
        toy.Strategy(DecodeContext(type("Model", (), {"interfaces": {"toy": toy.head()}})(), None, NoOptions()))
