"""Prefix beam search: exact sums, pruning, ties, n best, frames, odd numbers; offline."""

from __future__ import annotations

import logging
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.errors import PluginContractError
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import Run, scripted_output
from oasr_ctc.greedy import InvalidLogProbsError

NAN, INF = math.nan, math.inf


def output(rows, lengths=None):
    log_probs = torch.as_tensor(rows, dtype=torch.float32)
    lengths = torch.full((len(log_probs),), log_probs.shape[1]) if lengths is None else torch.as_tensor(lengths)
    return EncoderOutput(torch.zeros(1), lengths, log_probs)


def decode(strategy, rows, **options):
    (hyps,) = strategy.decode_offline(output(rows[None]), [DecodingOptions(**options)])
    return hyps


def random_rows(count, frames, vocab, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(1, frames + 1, (1,), generator=generator))
        yield (torch.randn(length, vocab, generator=generator) * scale).log_softmax(-1)


@pytest.mark.parametrize("blank_id", [0, 1, 2])
def test_a_wide_beam_is_the_sum_over_all_alignments(make_strategy, all_alignments, blank_id):
    strategy = make_strategy(3, blank_id, search="beam", beam_size=100, blank_threshold=1.0)
    for log_probs in random_rows(40, 5, 3, seed=blank_id):
        want = all_alignments(log_probs.tolist(), blank_id)
        got = {tuple(hyp.tokens): hyp.score for hyp in decode(strategy, log_probs, n_best=100).nbest}
        assert set(got) == set(want)
        assert all(got[tokens] == pytest.approx(want[tokens], abs=1e-9) for tokens in want)
        assert sum(map(math.exp, got.values())) == pytest.approx(1.0, abs=1e-5)


def test_the_best_frames_are_those_of_the_best_alignment(make_strategy):
    strategy = make_strategy(3, search="beam", beam_size=100, blank_threshold=1.0)
    for log_probs in random_rows(20, 5, 3, seed=5):
        best: dict = {}
        for labels in np.indices((3,) * len(log_probs)).reshape(len(log_probs), -1).T.tolist():
            previous = [0, *labels[:-1]]
            starts = [t for t, (a, b) in enumerate(zip(previous, labels, strict=True)) if b and a != b]
            score = sum(log_probs[t, label].item() for t, label in enumerate(labels))
            tokens = tuple(labels[t] for t in starts)
            if score > best.get(tokens, (-INF,))[0]:
                best[tokens] = (score, starts, labels)
        for hyp in decode(strategy, log_probs, n_best=100).nbest:
            _, starts, _ = best[tuple(hyp.tokens)]
            assert hyp.frames == starts
            for token, frame, log_prob in zip(hyp.tokens, hyp.frames, hyp.token_log_probs, strict=True):
                assert log_prob == log_probs[frame : frame + 2, token].max()
        winner = decode(strategy, log_probs)
        labels = best[tuple(winner.best.tokens)][2]
        assert winner.trailing_silence_frames == next((n for n, x in enumerate(labels[::-1]) if x), len(labels))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_narrow_beam_equals_the_dictionary_search(make_strategy, prefix_beam, data):
    vocab = data.draw(st.integers(2, 9))
    setting = {
        "beam_size": data.draw(st.integers(1, 6)),
        "first_beam_size": data.draw(st.none() | st.integers(1, 5)),
    }
    threshold = data.draw(st.sampled_from([1.0, 0.98, 0.5]))
    blank_id = data.draw(st.integers(0, vocab - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    log_probs = (torch.randn(data.draw(st.integers(0, 20)), vocab, generator=generator) * 2).log_softmax(-1)
    strategy = make_strategy(vocab, blank_id, search="beam", blank_threshold=threshold, **setting)
    want = prefix_beam(log_probs.tolist(), blank_id=blank_id, threshold=threshold, **setting)
    got = decode(strategy, log_probs, n_best=setting["beam_size"]).nbest
    assert [hyp.tokens for hyp in got] == [tokens for tokens, *_ in want]
    assert [hyp.frames for hyp in got] == [frames for *_, frames in want]
    assert [hyp.score for hyp in got] == pytest.approx([score for _, score, *_ in want], abs=1e-9)


def test_every_label_is_considered_not_only_the_best(make_strategy):
    # Both prefixes end in label 1, the best of the last frame after blank; the third label wins for neither of the two
    # only if a search looks at as few labels as it keeps prefixes.
    rows = torch.tensor([[0.1, 0.8, 0.05, 0.05], [0.06, 0.7, 0.14, 0.1]]).log()
    (best, second) = decode(make_strategy(4, search="beam", beam_size=2), rows, n_best=2).nbest
    assert (best.tokens, second.tokens) == ([1], [1, 2])
    pruned = decode(make_strategy(4, search="beam", beam_size=2, first_beam_size=1), rows, n_best=2).nbest
    assert [hyp.tokens for hyp in pruned] == [[1]]


def test_repeats_need_a_blank_between_them(make_strategy):
    strategy = make_strategy(search="beam")
    out = scripted_output([[Run(0, 2), Run(3, 3), Run(4), Run(0), Run(4, 2), Run(0, 5)]], 5)
    (hyps,) = strategy.decode_offline(out, [DecodingOptions()])
    assert (hyps.best.tokens, hyps.best.frames, hyps.trailing_silence_frames) == ([3, 4, 4], [2, 5, 7], 5)


def test_ties_have_an_order(make_strategy):
    flat = torch.full((1, 5), math.log(0.2))
    nbest = decode(make_strategy(5, 2, search="beam"), flat, n_best=10).nbest
    assert [hyp.tokens for hyp in nbest] == [[], [0], [1], [3], [4]]
    narrow = decode(make_strategy(5, 2, search="beam", beam_size=3), flat, n_best=3).nbest
    assert [hyp.tokens for hyp in narrow] == [[], [0], [1]]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98, 1.0])
def test_blank_threshold(make_strategy, share):
    rows = torch.tensor([[0.02, 0.98], [0.6, 0.4], [0.985, 0.015], [0.1, 0.9], [0.6, 0.4]]).log()
    strategy = make_strategy(2, search="beam", blank_threshold=share)
    best = decode(strategy, rows).best
    want = {0.0: [], 0.5: [1, 1], 0.98: [1, 1], 1.0: [1, 1]}[share]
    assert best.tokens == want
    blanks = rows[:, 0].double()
    if share == 0.0:
        assert best.score == pytest.approx(blanks.sum().item())
    elif share == 0.5:
        exact = rows[0, 1] + blanks[1] + blanks[2] + rows[3, 1] + blanks[4]
        assert best.score == pytest.approx(exact.item(), abs=1e-6)
    certain = torch.tensor([[0.0, -INF], [-1.0, -0.5]])
    assert decode(make_strategy(2, search="beam", blank_threshold=1.0), certain).best.tokens == [1]


def test_a_skipped_frame_separates_repeats_and_raises_posteriors(make_strategy):
    rows = torch.tensor([[0.4, 0.6], [0.01, 0.99], [0.99, 0.01], [0.4, 0.6]]).log()
    hyps = decode(make_strategy(2, search="beam"), rows)
    assert hyps.best.tokens == [1, 1]
    assert hyps.best.token_log_probs[0] == rows[1, 1]


def test_no_more_hypotheses_than_there_are(make_strategy):
    rows = torch.tensor([[0.5, 0.5]]).log()
    hyps = decode(make_strategy(2, search="beam"), rows, n_best=10)
    assert [hyp.tokens for hyp in hyps.nbest] == [[], [1]]
    assert len(decode(make_strategy(2, search="beam"), rows).nbest) == 1


def test_all_blank_no_frames_and_no_rows(make_strategy):
    strategy = make_strategy(search="beam")
    blank, nothing = strategy.decode_offline(scripted_output([[Run(0, 4)], []], 5), [DecodingOptions()] * 2)
    for hyps, silence in ((blank, 4), (nothing, 0)):
        assert (hyps.best.tokens, hyps.best.frames, hyps.best.token_log_probs) == ([], [], [])
        assert hyps.trailing_silence_frames == silence
    assert nothing.best.score == 0.0
    assert strategy.decode_offline(output(torch.zeros(0, 3, 5), torch.zeros(0, dtype=torch.int64)), []) == []
    (empty,) = strategy.decode_offline(output(torch.zeros(1, 0, 5)), [DecodingOptions()])
    assert empty.best.tokens == []


@pytest.mark.parametrize("blank_id", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.98, 1.0])
def test_frames_without_any_posterior_count_as_blank(make_strategy, blank_id, share):
    rows = torch.full((4, 5), -INF)
    strategy = make_strategy(5, blank_id, search="beam", blank_threshold=share)
    hyps = decode(strategy, rows)
    assert (hyps.best.tokens, hyps.best.score, hyps.trailing_silence_frames) == ([], 0.0, 4)
    rows[1] = torch.tensor([0.1, 0.1, 0.6, 0.1, 0.1]).log()
    hyps = decode(strategy, rows)
    assert hyps.best.tokens == ([] if share == 0.0 else [2])
    assert hyps.best.score == pytest.approx(math.log(0.1 if share == 0.0 else 0.6))


def test_impossible_blank_and_impossible_labels(make_strategy):
    rows = torch.tensor([[-INF, -0.1, -INF], [-INF, -0.2, -INF], [-INF, -INF, -0.3]])
    nbest = decode(make_strategy(3, search="beam"), rows, n_best=10).nbest
    assert [(hyp.tokens, hyp.frames) for hyp in nbest] == [([1, 2], [0, 2])]
    assert nbest[0].score == pytest.approx(-0.6)
    for share in (0.0, 0.98):
        assert math.isfinite(decode(make_strategy(3, search="beam", blank_threshold=share), rows).best.score)


@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 2, 4)])
def test_nan_and_inf_are_refused_and_the_rows_named(make_strategy, value, place):
    out = scripted_output([[Run(0, 3, 0.99)], [Run(4, 3)]], 5)
    out.log_probs[place] = value
    strategy = make_strategy(search="beam")
    with pytest.raises(InvalidLogProbsError, match=rf"row\(s\) \[0\].*frame {place[1]} of row 0") as caught:
        strategy.decode_offline(out, [DecodingOptions()] * 2)
    assert caught.value.rows == (0,)
    assert strategy.search.pool.num_open == 0


@pytest.mark.parametrize("padding", [NAN, INF, -INF, 1e4, 0.0])
def test_padding_changes_nothing(make_strategy, padding):
    strategy, options = make_strategy(search="beam"), DecodingOptions(n_best=10)
    scripts = [[Run(3, 2), Run(0), Run(4)], [Run(2, 9)], [Run(4)], []]
    alone = [strategy.decode_offline(scripted_output([script], 5), [options])[0] for script in scripts]
    assert strategy.decode_offline(scripted_output(scripts, 5, padding=padding), [options] * 4) == alone


def test_no_cap_unless_one_is_set(make_strategy):
    script = [run for _ in range(125) for run in (Run(1, 1, 0.999), Run(2, 1, 0.999))]
    out = scripted_output([script], 3)
    (free,) = make_strategy(3, search="beam").decode_offline(out, [DecodingOptions()])
    assert (free.best.tokens, free.reached_cap) == ([1, 2] * 125, False)
    (capped,) = make_strategy(3, search="beam", max_seq_len=200).decode_offline(out, [DecodingOptions()])
    assert (capped.best.tokens, capped.reached_cap) == ([1, 2] * 100, True)
    rows = torch.tensor([[-INF, 0.0, -INF], [-INF, -INF, 0.0]])
    dead_end = decode(make_strategy(3, search="beam", max_seq_len=1), rows)
    assert (dead_end.best.tokens, dead_end.reached_cap) == ([1], True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_strides_are_taken(make_strategy, dtype):
    (log_probs,) = random_rows(1, 12, 6, seed=3)
    strategy = make_strategy(6, search="beam")
    want = decode(strategy, log_probs.to(dtype).float(), n_best=5)
    turned = log_probs.to(dtype).t().contiguous().t()
    out = EncoderOutput(torch.zeros(1), torch.tensor([len(turned)], dtype=torch.int32), turned[None])
    assert strategy.decode_offline(out, [DecodingOptions(n_best=5)]) == [want]


def test_contract_violations_are_named(make_strategy):
    strategy = make_strategy(search="beam")
    with pytest.raises(PluginContractError, match=r"log_probs of 6 labels .* vocab_size=5"):
        decode(strategy, torch.zeros(2, 6).log_softmax(1))
    with pytest.raises(PluginContractError, match="2 requests and log_probs of 1 rows"):
        strategy.decode_offline(output(torch.zeros(1, 2, 5)), [DecodingOptions()] * 2)
    assert strategy.search.pool.num_open == 0


def test_the_kernels_are_compiled_once_and_said_so(make_strategy, caplog):
    from oasr_ctc import emissions, prefix_search, selection

    with caplog.at_level(logging.INFO):
        strategy = make_strategy(130, search="beam")
    assert "kernels ready in" in caplog.text
    rng = random.Random(0)
    for log_probs in random_rows(5, 30, 130):
        decode(strategy, log_probs, n_best=rng.randint(1, 10), hotwords=[chr(rng.randint(5, 20) + 90)])
    kernels = [selection.select_labels, prefix_search.search, emissions.trace, emissions.settle, emissions.agreed]
    assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels)
